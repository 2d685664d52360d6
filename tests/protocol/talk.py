"""A syncer's machine in talk with learners: what it hears, and what it does then.

    talk = Talk('l0', 'l1', quorum=2)            # both have joined
    talk.steps('l0', 'l1', to=2)                 # their progress; sync 2 opens
    talk.hears('l0', single.contribution(), 5)   # a message, and the id of its payload
    assert talk.merges and not talk.said         # what the syncer did in this turn

A learner is named by its id, or a session by its number. Every turn ends with the machine's own
`check`.
"""

import dataclasses
import functools
from typing import Any

from diloco_jax.protocol import actions, events, messages
from diloco_jax.protocol.syncer import machine as syncer_machine
from diloco_jax.protocol.syncer import recovery
from diloco_jax.verification.sim import network as network_lib
from diloco_jax.verification.sim import world as world_lib
from tests.protocol import single


class Talk:
  """One syncer, and the sessions of its learners.

  Attributes:
    machine: the syncer's.
    now_ns: the time of the next turn.
    out: the actions of the last turn, or of the last call of a method that has several.
    session: of each learner id, the newest.
  """

  def __init__(self, *learners: str, machine: Any = None, **settings: Any):
    self.machine = machine or single.new_machine(**{'learners': max(1, len(learners)), **settings})
    self.now_ns = 0
    self.out: list[actions.Action] = []
    self.session: dict[str, int] = {}
    self._nonces: dict[str, int] = {}
    self._sessions = 0
    for name in learners:
      self.joins(name)

  # --- What it hears ------------------------------------------------------------------------------

  def turn(self, *happened: events.Event) -> list[actions.Action]:
    self.out = []
    for event in happened:
      self.out += self.machine.handle(self.now_ns, event)
      self.machine.check()
    return self.out

  def hears(self, who: str | int, message: messages.Message, payload_id: int | None = None) -> list:
    """A message arrives from a learner, or on a session."""
    session = self.session[who] if isinstance(who, str) else who
    return self.turn(single.received(session, message, payload_id))

  def asks(self, name: str, *, process: int = 1, proved: str = '', **fields: Any) -> list:
    """A process of a learner connects and sends its Join. `process`: which one of its id, in the
    order of their nonces; `proved`: the id in its certificate."""
    self._sessions += 1
    self.session[name] = session = self._sessions
    self._nonces[name] = 7 + int(name[1:] or 0) + 100 * process
    connected = [events.Connected(session=session, learner=proved)] if proved else []
    join = dataclasses.replace(single.join(name, self._nonces[name]), **fields)
    return self.turn(*connected, single.received(session, join))

  def confirms(self, name: str, **claims: Any) -> list:
    """Its Confirm of what it was offered in the last turn. `claims`: fields of it."""
    offered = [message.incarnation for message in self.sent(messages.Offer)]
    fragments = self.machine._config.fragments
    confirm = single.confirm(self._nonces[name], fragments, *offered)
    return self.hears(name, dataclasses.replace(confirm, **claims))

  def joins(self, name: str, *, process: int = 1, join: dict | None = None, **claims: Any) -> list:
    """Join and Confirm on a new session; `join`: fields of the Join, `claims` of the Confirm."""
    self.asks(name, process=process, **(join or {}))
    return self.confirms(name, **claims) if self.sent(messages.Offer) else self.out

  def steps(self, *names: str, to: int, **fields: Any) -> list:
    """Learners report that they have made their steps up to this one."""
    report = dataclasses.replace(single.progress(to), **fields)
    return self.turn(*(single.received(self.session[name], report) for name in names))

  def adopts(self, *names: str, version: int, tokens: int, fragment: int = 0) -> list:
    """Learners report that a version is their anchor now, and which of their tokens it settles."""
    report = messages.Adopted(fragment=fragment, version=version, tokens=tokens, matched=True)
    return self.turn(*(single.received(self.session[name], report) for name in names))

  def loses(self, *names: str, reason: str = 'cut') -> list:
    """The sessions of these learners end."""
    ended = (self.session[name] for name in names)
    return self.turn(*(events.Disconnected(session=number, reason=reason) for number in ended))

  def wakes(self, at_ns: int | None = None) -> list:
    self.now_ns = self.now_ns if at_ns is None else at_ns
    return self.turn(events.Wake())

  def restarted(self, state: dict[str, Any] | None = None, **settings: Any) -> 'Talk':
    """The next syncer, which goes on from a machine state (by default this one), perhaps with other
    settings."""
    config = dataclasses.replace(self.machine._config, **settings)
    sizes = (network_lib.PAYLOAD_BYTES,) * config.fragments
    state = self.machine.state() if state is None else state
    return Talk(
      machine=syncer_machine.SyncerMachine.restore(config, world_lib.AGREEMENT, sizes, state)
    )

  def recovered(self, state: dict[str, Any], *records: recovery.Ended) -> dict[str, Any]:
    """The machine state after these outer steps of the log, which follow a checkpoint's state."""
    config = self.machine._config
    sizes = (network_lib.PAYLOAD_BYTES,) * config.fragments
    load = syncer_machine.SyncerMachine.load
    return recovery.replay_log(
      functools.partial(load, config, world_lib.AGREEMENT, sizes), state, records
    )

  # --- What it does -------------------------------------------------------------------------------

  def of(self, kind: type) -> list[Any]:
    """The actions of this kind in the last turn."""
    return [action for action in self.out if isinstance(action, kind)]

  def sent(self, kind: Any = messages.Message, who: str = '') -> list[Any]:
    """The messages of this kind in the last turn, to all or to one learner."""
    return [
      action.message
      for action in self.of(actions.Send)
      if isinstance(action.message, kind) and (not who or action.session == self.session[who])
    ]

  @property
  def said(self) -> list[str]:
    return [action.text for action in self.of(actions.Say)]

  @property
  def closed(self) -> list[int]:
    """The sessions that it has closed."""
    return [action.session for action in self.of(actions.Close)]

  @property
  def merges(self) -> list[actions.Merge]:
    return self.of(actions.Merge)

  @property
  def refusals(self) -> list[str]:
    return [message.code for message in self.sent(messages.Refused)]

  def member(self, name: str = 'l0') -> dict[str, Any]:
    """Its row in the machine state."""
    rows = {row['learner']: row for row in self.machine.state()['members']}
    return rows[name]
