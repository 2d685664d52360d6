"""Narrates a run: one line per action that matters.

Left out: heartbeats, progress reports, inner steps, dropped payloads, and reports, most of which
repeat another line.
"""

from collections.abc import Callable
from typing import Any

from diloco_jax.protocol import actions, events, facts, messages
from diloco_jax.protocol.tape import observers
from diloco_jax.verification.sim import engine as engine_lib

MS = engine_lib.MS
SILENT = messages.Heartbeat | messages.Progress | messages.Adopted


def describe(action: Any) -> str:
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
      shares = ', '.join(
        f'{participant.learner} {participant.tokens}/{participant.steps}'
        for participant in participants
      )
      return f'merges sync {sync} into version {version} of fragment {p}: {shares}'
    case actions.Adopt(fragment=p, version=version, whole=whole, keep=keep, merged=merged):
      kept = (
        'keeps what is not merged' if merged else 'keeps its steps' if keep else 'keeps nothing'
      )
      return f'adopts version {version} of fragment {p}{" (whole)" if whole else ""}, {kept}'
    case actions.UseShard(shard=shard, cursor=cursor, rewind=rewind):
      return f'reads data shard {shard} from batch {cursor}{", rewound" if rewind else ""}'
    case actions.Save(clock=step):
      return f'saves at {step}'
    case actions.Report(fact=facts.Opened(sync=sync, fragment=p)):
      return f'opens sync {sync} of fragment {p}'
    case actions.Report(fact=facts.Cancelled(sync=sync, fragment=p, why=why)):
      return f'cancels sync {sync} of fragment {p}: {why}'
    case actions.Report(fact=facts.Merging(why=why, waited_ns=waited_ns, grace_ns=grace_ns)):
      return f'  because {why} (open for {waited_ns / MS:g} ms, grace {grace_ns / MS:g} ms)'
    case actions.Report(fact=facts.Member(state='lost', learner=name, reason=reason)):
      return f'loses {name}: {reason}'
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
    case messages.Confirm(incarnation=incarnation, clock=step, held=held):
      return f'Confirm incarnation {incarnation} at step {step}, holds {[h.version for h in held]}'
    case messages.Joined(
      incarnation=incarnation, clock=step, shard=v, cursor=cursor, due=due, settled=settled
    ):
      text = (
        f'Joined incarnation {incarnation}, clock {step}, shard {v} from {cursor}, due {list(due)}'
      )
      return text + (f', settled to {list(settled)}' if any(settled) else '')
    case messages.Pull(sync=sync, fragment=p, now=now):
      return f'Pull sync {sync} fragment {p}{", now" if now else ""}'
    case messages.Contribution(sync=sync, version=version, tokens_from=start, tokens_to=end):
      return f'Contribution sync {sync} from version {version}, tokens [{start}, {end})'
    case messages.Decline(sync=sync, reason=reason):
      return f'Decline sync {sync}: {reason}'
    case messages.Publish(
      fragment=p, version=version, base_version=base, settled_to=upto, keep=keep
    ):
      kind = 'whole' if base is None else 'delta'
      text = f'Publish version {version} of fragment {p}, {kind}, settled to {upto}'
      return text + ('' if keep else ', keep nothing')
    case messages.Settled(sync=sync, merged=merged, reason=reason):
      return f'Settled sync {sync}: {"merged" if merged else reason}'
    case messages.Refused(code=code, retry_ns=retry_ns):
      retry = 'never retry' if retry_ns is None else f'retry in {retry_ns / MS:g} ms'
      return f'Refused {code}, {retry}'
    case messages.Leave(reason=reason):
      return f'Leave: {reason}'
  return type(message).__name__


class Story(observers.Observer):
  """An observer that narrates line by line: milliseconds, node, (receiver,) action."""

  def __init__(self, tell: Callable[[str], None]):
    self._tell = tell
    self._nodes: dict[int, str] = {}  # by nonce
    self._peers: dict[int, str] = {}  # by session of the syncer: the node

  def note(self, now_ns: int, text: str) -> None:
    """A line that is not an action of a machine."""
    self._tell(f'{now_ns // MS:6} {text}')

  def born(self, now_ns: int, process: observers.ObservedProcess) -> None:
    if process.start.role == 'syncer':
      self._peers.clear()
    else:
      self._nodes[process.start.identity.nonce] = process.start.node

  def saw(
    self,
    process: observers.ObservedProcess,
    now_ns: int,
    event: events.Event,
    out: observers.Actions,
  ) -> None:
    syncer = process.start.role == 'syncer'
    if syncer and isinstance(event, events.Received) and isinstance(event.message, messages.Join):
      self._peers[event.session] = self._nodes[event.message.nonce]
    for action in out:
      text = describe(action)
      if text:
        to = ''
        if syncer and isinstance(action, actions.Send | actions.Close):
          to = f' {self._peers.get(action.session, "?")}'
        self.note(now_ns, f'{process.start.node:6}{to} {text}')

  def crashed(
    self, process: observers.ObservedProcess, now_ns: int, event: events.Event, error: Exception
  ) -> None:
    self.note(now_ns, f'{process.start.node:6} raises {type(error).__name__}: {error}, on {event}')

  def logged(self, now_ns: int, note: observers.LogNote) -> None:
    begins = note.kind == 'recovered' and not note.number
    if note.kind not in ('appended', 'durable') and not begins:
      self.note(now_ns, f'log    {note.kind}, record {note.number} {note.text}'.rstrip())
