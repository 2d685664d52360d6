"""Scenario scripts: commands and the behaviour that they cause, as text (tests/scenarios).

A script is blocks of `command lines`, `----`, `output`, blank line; `#` begins a comment.

    run NAME=VALUE ...            a run: ProtocolConfig's fields, times as *_ms
    start ID [NAME=MS ...] [restored] [second] [width=N]   a process; step, up, down, bulk_up,
                                  bulk_down, encode
    set ID|syncer NAME=MS ...     changes these times; loss and duplicate are per mille of messages
    for MS [quiet]                time passes; prints the actions unless quiet
    reset | kill | freeze | thaw | heal | stop  ID|syncer
    partition ID [up|down]        cuts the link (or one direction) without telling either end
    restart syncer                from its disk
    nan | flip  ID FRAGMENT       its next capture holds a NaN; its next adoption has a wrong bit
    spoil ID huge|poison N        its next N captures of each fragment: a huge norm, NaN
    fail                          the next outer step is not finite
    ledger                        prints the newest ledger

verification/sim/narrate.py writes the output, one line per action: milliseconds, node, action.
"""

import dataclasses
from typing import Any

from diloco_jax.protocol import config as config_lib
from diloco_jax.verification.sim import engine as engine_lib
from diloco_jax.verification.sim import narrate
from diloco_jax.verification.sim import processes as sim_processes
from diloco_jax.verification.sim import world as world_lib

MS = engine_lib.MS
LINK = ('up', 'down', 'bulk_up', 'bulk_down')
ISLAND = ('step', 'encode', 'adopt')
RATES = ('loss', 'duplicate')


def make_config(**changes: Any) -> config_lib.ProtocolConfig:
  """A config with short times and no saves; `*_ms` may be given instead of `*_ns`."""
  settings = {'lease_ms': 1000, 'start_wait_ms': 0, 'save_steps': 0, **changes}
  for name in [name for name in settings if name.endswith('_ms')]:
    settings[name[:-3] + '_ns'] = settings.pop(name) * MS
  return config_lib.ProtocolConfig(**settings)


class Script:
  """Runs the commands of one script."""

  def __init__(self):
    self._world: world_lib.World | None = None
    self._lines: list[str] = []

  def rerun(self, text: str) -> str:
    """The same script with the present behaviour."""
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
        config = make_config(**{k: int(v) for k, v in options.items()})
        self._world = world_lib.World(config, watchers=[narrate.Story(self._tell)])
      case 'start', [name, *how]:
        self._start(name, how, options)
      case 'set', [name]:
        self._set(self._process(name), options)
      case 'for', [duration, *quiet]:
        self._pass(int(duration), bool(quiet))
      case (('freeze' | 'thaw'), [name]):
        getattr(self._process(name), verb)()
      case 'reset', [name]:
        self._world.network.reset(self._process(name))
      case 'partition', [name, *lanes]:
        self._world.link(name).cut.update(lanes or ['up', 'down'])
      case 'heal', [name]:
        self._world.network.heal(self._world.link(name))
      case 'kill', [name]:
        self._world.end(self._process(name))
      case 'stop', [name]:
        self._process(name).stop('preempted')
      case 'restart', ['syncer']:
        self._world.start_syncer()
      case (('nan' | 'flip'), [name, fragment]):
        process = self._process(name)
        (process.nan if verb == 'nan' else process.flips).add(int(fragment))
      case 'spoil', [name, how, number]:
        fragments = range(self._world.config.fragments)
        self._process(name).spoiled = dict.fromkeys(fragments, (how, int(number)))
      case 'fail', []:
        self._world.syncer.not_finite = True
      case 'ledger', []:
        self._ledger()
      case _:
        raise ValueError(f'no such command: {verb} {" ".join(words_)}')

  def _tell(self, line: str) -> None:
    self._lines.append(line)

  def _start(self, name: str, how: list[str], options: dict[str, str]) -> None:
    width = options.pop('width', '8')
    agreement = world_lib.AGREEMENT.replace('8', width)
    process = self._world.start(name, agreement, restored='restored' in how, second='second' in how)
    self._set(process, options)

  def _set(self, process: sim_processes.Process, options: dict[str, str]) -> None:
    for name, value in options.items():
      if name in RATES:
        setattr(self._world.link(process.name), name, int(value))
        continue
      owner = process
      if name in LINK:
        owner = self._world.link(process.name)
      elif name in ISLAND:
        owner = process.island
      assert hasattr(owner, f'{name}_ns'), name
      setattr(owner, f'{name}_ns', int(value) * MS)

  def _process(self, name: str) -> sim_processes.Process:
    return self._world.syncer if name == 'syncer' else self._world.learners[name]

  def _pass(self, duration_ms: int, quiet: bool) -> None:
    before = len(self._lines)
    self._world.run(self._world.now_ns + duration_ms * MS)
    if quiet:
      del self._lines[before:]

  def _ledger(self) -> None:
    totals = dataclasses.asdict(self._world.ledger())
    learners = totals.pop('learners')
    self._lines.append(', '.join(f'{key} {value}' for key, value in totals.items()))
    for name, row in learners.items():
      self._lines.append(f'  {name}: ' + ', '.join(f'{key} {value}' for key, value in row.items()))
