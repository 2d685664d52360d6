"""Scenario scripts: commands and the behaviour that they cause, as text (scenarios/*.txt).

A script is blocks of `command lines`, `----`, `what happened`, blank line; `#` begins a comment.

    run NAME=VALUE ...            a run: ProtocolConfig's fields, times as *_ms
    start ID [NAME=MS ...] [restored] [second] [width=N]   a process; step, up, down, bulk, encode
    set ID|syncer NAME=MS ...     changes such times
    for MS [quiet]                time passes; what happens is printed unless quiet
    cut | kill | freeze | thaw | partition | heal | stop  ID|syncer
    restart syncer                from its last durable snapshot
    nan | flip  ID FRAGMENT       its next snapshot holds a NaN; its next adoption errs by a bit
    fail                          the next outer step is not finite
    ledger                        the newest one

One line per action: milliseconds, who, what. Left out: heartbeats, Progress, steps, dropped handles
and reports, of which most say what another line says.
"""

from typing import Any

from diloco_jax.protocol import actions, messages
from tests.protocol import processes
from tests.protocol import world as world_lib

MS = world_lib.MS
SILENT = messages.Heartbeat | messages.Progress | messages.Adopted


def words(action: Any) -> str:
  """An action in one line, or '' if it is left out."""
  match action:
    case actions.Send(message=message) if not isinstance(message, SILENT):
      return f'-> {_message(message)}'
    case actions.Send(message=messages.Adopted(fragment=p, version=v, matched=False)):
      return f'-> Adopted version {v} of fragment {p} does not match'
    case actions.Dial(session=session):
      return f'dials, session {session}'
    case actions.Close(reason=reason):
      return f'closes: {reason}'
    case actions.Merge(sync=sync, fragment=p, version=version, participants=participants):
      shares = ', '.join(f'{one.learner} {one.tokens}/{one.steps}' for one in participants)
      return f'merges sync {sync} into version {version} of fragment {p}: {shares}'
    case actions.Adopt(fragment=p, version=version, whole=whole):
      return f'adopts version {version} of fragment {p}{" (whole)" if whole else ""}'
    case actions.UseStream(stream=stream):
      return f'uses data stream {stream}'
    case actions.Save(step=step):
      return f'saves at {step}'
    case actions.Report(name='cancelled', values=values):
      return f'cancels sync {values["sync"]} of fragment {values["fragment"]}: {values["why"]}'
    case actions.Report(name='synced', values=values):
      return f'  because {values["why"]} (grace {values["grace_ns"] / MS:g} ms)'
    case actions.Report(name='member', values={'state': 'lost', 'learner': name, **values}):
      return f'loses {name}: {values["reason"]}'
    case actions.Say(text=text):
      return f'"{text}"'
    case actions.Exit(code=code, text=text):
      return f'exits with {code}: {text}'
  return ''


def _message(message: Any) -> str:
  match message:
    case messages.Join(nonce=nonce):
      return f'Join as process {nonce}'
    case messages.Offer(incarnation=incarnation):
      return f'Offer incarnation {incarnation}'
    case messages.Confirm(incarnation=incarnation, step=step, held=held):
      return f'Confirm incarnation {incarnation} at step {step}, holds {[h.version for h in held]}'
    case messages.Joined(incarnation=incarnation, step=step, stream=stream, due=due):
      return f'Joined incarnation {incarnation}, clock {step}, stream {stream}, due {list(due)}'
    case messages.Pull(sync=sync, fragment=p):
      return f'Pull sync {sync} fragment {p}'
    case messages.Contribution(sync=sync, version=version, tokens_from=start, tokens_to=end):
      return f'Contribution sync {sync} from version {version}, tokens [{start}, {end})'
    case messages.Decline(sync=sync, reason=reason):
      return f'Decline sync {sync}: {reason}'
    case messages.Publish(fragment=p, version=version, base_version=base):
      return f'Publish version {version} of fragment {p}, {"whole" if base is None else "delta"}'
    case messages.Settled(sync=sync, merged=merged, reason=reason):
      return f'Settled sync {sync}: {"merged" if merged else reason}'
    case messages.Refused(code=code, retry_ns=retry_ns):
      return f'Refused {code}, {"for good" if retry_ns is None else f"for {retry_ns / MS:g} ms"}'
    case messages.Leave(reason=reason):
      return f'Leave: {reason}'
  return type(message).__name__


class Script:
  """Runs the commands of one script."""

  def __init__(self):
    self._world: world_lib.World | None = None
    self._lines: list[str] = []

  def rerun(self, text: str) -> str:
    """The same script with what happens now."""
    out = []
    for block in text.strip().split('\n\n'):
      lines = block.split('\n----')[0].split('\n')
      self._lines = []
      for line in lines:
        if line and not line.startswith('#'):
          self.command(*line.split())
      happened = ['----', *(self._lines or ['(nothing)'])]
      is_comment = all(line.startswith('#') for line in lines)
      out.append('\n'.join(lines if is_comment else [*lines, *happened]))
    return '\n\n'.join(out) + '\n'

  def command(self, verb: str, *words_: str) -> None:
    options = dict(word.split('=') for word in words_ if '=' in word)
    plain = [word for word in words_ if '=' not in word]
    match verb, plain:
      case 'run', []:
        config = world_lib.protocol_config(**{k: int(v) for k, v in options.items()})
        self._world = world_lib.World(config, self._watch)
      case 'start', [name, *how]:
        self._start(name, how, options)
      case 'set', [name]:
        self._set(self._process(name), options)
      case 'for', [duration, *quiet]:
        self._pass(int(duration), bool(quiet))
      case ('freeze' | 'thaw'), [name]:
        getattr(self._process(name), verb)()
      case ('cut' | 'partition' | 'heal'), [name]:
        getattr(self._world, verb)(name)
      case 'kill', [name]:
        self._world.end(self._process(name))
      case 'stop', [name]:
        self._process(name).stop('preempted')
      case 'restart', ['syncer']:
        self._world.start_syncer()
      case ('nan' | 'flip'), [name, fragment]:
        process = self._process(name)
        (process.nan if verb == 'nan' else process.flips).add(int(fragment))
      case 'fail', []:
        self._world.syncer.fail = True
      case 'ledger', []:
        self._ledger()
      case _:
        raise ValueError(f'no such command: {verb} {" ".join(words_)}')

  def _start(self, name: str, how: list[str], options: dict[str, str]) -> None:
    width = options.pop('width', '8')
    agreement = world_lib.AGREEMENT.replace('8', width)
    process = self._world.start(
      name, agreement, restored='restored' in how, second='second' in how)
    self._set(process, options)

  def _set(self, process: processes.Process, options: dict[str, str]) -> None:
    for name, value in options.items():
      assert hasattr(process, f'{name}_ns'), name
      setattr(process, f'{name}_ns', int(value) * MS)

  def _process(self, name: str) -> processes.Process:
    return self._world.syncer if name == 'syncer' else self._world.learners[name]

  def _pass(self, duration_ms: int, quiet: bool) -> None:
    before = len(self._lines)
    self._world.run(self._world.now + duration_ms * MS)
    if quiet:
      del self._lines[before:]

  def _watch(self, name: str, action: Any) -> None:
    text = words(action)
    if text:
      to = ''
      if name == 'syncer' and isinstance(action, actions.Send | actions.Close):
        session = self._world.sessions.get(('syncer', action.session))
        to = f' {session.learner.name if session else "?"}'
      self._lines.append(f'{self._world.now // MS:6} {name:6}{to} {text}')

  def _ledger(self) -> None:
    totals = self._world.ledger()
    learners = totals.pop('learners')
    self._lines.append(', '.join(f'{key} {value}' for key, value in totals.items()))
    for name, row in learners.items():
      self._lines.append(f'  {name}: ' + ', '.join(f'{key} {value}' for key, value in row.items()))
