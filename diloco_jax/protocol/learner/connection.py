"""A learner's connection to its syncer (docs/protocol.md draws it from CONNECTION_STATES).

Training does not wait for the connection, which dials again until it succeeds. The pauses grow and
are jittered, so that many learners that lost one syncer do not dial at the same moment. Each pause
is a quarter longer, so a learner reconnects at most about a quarter of the outage after its end. If
the syncer sends nothing for a lease, the learner closes the session. From its Confirm on a learner
renews its own lease with heartbeats.
"""

import dataclasses
import random

from diloco_jax.protocol import action_list, actions, messages
from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol import states as protocol_states
from diloco_jax.protocol.learner import alone
from diloco_jax.protocol.learner import missing_step as missing_step_lib
from diloco_jax.protocol.learner import stall_warning as stall_warning_lib

UNPROVED_NS = 600 * config_lib.SECOND_NS  # of refused certificates in a row: then the process ends
CONNECTION_STATES = (
  ('away', 'dialing', 'the pause is over'),
  ('dialing', 'joining', 'the session is open: Join'),
  ('joining', 'joined', 'Offer: Confirm, then Joined'),
  ('dialing', 'away', 'no session'),
  ('joining', 'away', 'refused for now, or the session closed'),
  ('joined', 'away', 'the session closed, or the syncer fell silent'),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Identity:
  """Identifies a process. Every process draws a new `nonce`; `seed` jitters its redials."""

  learner: str
  nonce: int
  agreement: str
  host: str
  pid: int
  seed: int = 0


class Connection:
  """The newest session and its state. Sessions are counted; messages of older ones are ignored."""

  def __init__(
    self, config: config_lib.ProtocolConfig, identity: Identity, out: action_list.ActionList
  ):
    self._config = config
    self._identity = identity
    self._out = out
    self.run, self.incarnation = '', 0  # under which the process has joined; '' and 0: none
    self._offered_run = ''
    self._random = random.Random(identity.seed)
    self.state = 'away'
    self.session = 0
    self._redial_ns = 0
    self._pause_ns = config.redial_ns
    self._heard_ns = 0
    self._heartbeat_ns = 0
    self._confirmed = False  # on this session: the learner has a lease to renew
    self.standing = stall_warning_lib.Standing(out)
    self.alone = alone.Alone()
    self.missing_step = missing_step_lib.MissingStep(config, identity.learner, out)
    self._refusals = self._refused = 0  # how many in a row; the session of the last one
    self._unproved_ns: int | None = None  # since when certificates are refused; None: they are not

  @property
  def joined(self) -> bool:
    return self.state == 'joined'

  def _move(self, state: str) -> None:
    self.state = protocol_states.move(CONNECTION_STATES, self.state, state)

  def send(self, message: messages.FromLearner, payload_id: int | None = None) -> None:
    self._out.send(self.session, message, payload_id)

  def heard(self, now_ns: int) -> None:
    self._heard_ns = now_ns
    self.alone.heard(now_ns)

  def deadline_ns(self, ending: bool) -> int | None:
    """When to call `keep`; a learner that is `ending` dials no more."""
    if self.state == 'away':
      return None if ending else self._redial_ns
    lease_ns = self._heard_ns + self._config.lease_ns
    return min(lease_ns, self._heartbeat_ns) if self._confirmed else lease_ns

  def keep(self, now_ns: int, ending: bool) -> None:
    """Dials after a pause, closes the session of a silent syncer, renews the lease."""
    if not ending:
      self.standing.say_if_due(now_ns)
    if self.state == 'away':
      if now_ns >= self._redial_ns and not ending:
        self._dial(now_ns)
    elif now_ns >= self._heard_ns + self._config.lease_ns:
      self._heard_ns = now_ns  # close once per lease; Disconnected follows
      self._confirmed = False
      self._out.close(self.session, 'the syncer fell silent')
    elif self._confirmed and now_ns >= self._heartbeat_ns:
      self._heartbeat_ns = now_ns + self._config.heartbeat_ns
      self.send(self.missing_step.heartbeat(now_ns))

  def _dial(self, now_ns: int) -> None:
    self.session += 1
    self._move('dialing')
    self._heard_ns = now_ns
    self._out.do(actions.Dial(session=self.session))

  def connected(self, now_ns: int) -> None:
    self._move('joining')
    self._heard_ns = now_ns
    self._unproved_ns = None
    join = messages.Join(
      protocol=messages.PROTOCOL_VERSION,
      run=self.run,
      learner=self._identity.learner,
      nonce=self._identity.nonce,
      incarnation=self.incarnation,
      agreement=self._identity.agreement,
      host=self._identity.host,
      pid=self._identity.pid,
    )
    self.send(join)

  def offered(self, offer: messages.Offer) -> bool:
    """Whether to accept an offer: not of another run than the one that the process belongs to."""
    if self.run not in ('', offer.run):
      self._out.close(self.session, f'a syncer of run {offer.run}, not {self.run}')
      return False
    self._offered_run = offer.run
    return True

  def confirm(self, now_ns: int, confirm: messages.Confirm) -> None:
    """Accepts an offer."""
    self._confirmed = True
    self._heartbeat_ns = now_ns + self._config.heartbeat_ns
    self.send(confirm)

  def welcomed(self, now_ns: int, incarnation: int) -> None:
    self._move('joined')
    self.standing.joined(now_ns)
    self.run, self.incarnation = self._offered_run, incarnation
    self._refusals = 0

  def refused(self, now_ns: int, refused: messages.Refused) -> str:
    """Returns the text of a final refusal, which ends the process, or plans the next attempt. An id
    in use may be held by this learner's previous process until its lease ends, so the learner tries
    that one once more."""
    if self._refused == self.session:
      return ''  # repeated
    self._refused = self.session
    if refused.code == 'UNPROVED':
      return self._unproved(now_ns, refused.text)
    self._refusals += 1
    if refused.retry_ns is None or (refused.code == 'ID_IN_USE' and self._refusals > 1):
      return refused.text
    self._redial_ns = now_ns + refused.retry_ns
    self.standing.refused(now_ns)
    self._out.say(f'{refused.text} Trying again in {refused.retry_ns / 1e9:.1f} s.')
    return ''

  def _unproved(self, now_ns: int, why: str) -> str:
    """Dials on for a while: a certificate may be renewed, and a revocation taken back."""
    if self._unproved_ns is None:
      self._unproved_ns = now_ns
    minutes = UNPROVED_NS // (60 * config_lib.SECOND_NS)
    if now_ns < self._unproved_ns + UNPROVED_NS:
      self.standing.unproved(
        now_ns,
        f'the syncer refuses this learner: {why}. Nothing that it trains is merged. It dials '
        f'again, and ends once it has been refused for {minutes} min.',
      )
      return ''
    return (
      f'The syncer has refused this learner for {minutes} min: {why}. What it trained meanwhile is '
      'not merged; what was merged before is safe. Give it a certificate that the syncer accepts '
      '(diloco certs issue --renew), then start it again.'
    )

  def has_ended(self, reason: str) -> bool:
    """Whether a session has closed for good: the run is over, or its syncer has ended so."""
    return reason.startswith(messages.ENDED) or bool(self.run and self.alone.gone(reason))

  def disconnected(self, now_ns: int, reason: str, ending: bool, stuck: bool) -> None:
    """The session has closed: pauses before the next attempt, unless the learner is `ending`.
    `stuck`: its step is missing."""
    joined = self.joined
    self._move('away')
    unproved = self._refused == self.session and self._unproved_ns is not None
    if not unproved:
      self.standing.disconnected(now_ns, reason)
    self._out.closing.discard(self.session)
    self._confirmed = False
    longer_ns = min(self._config.longest_redial_ns, self._pause_ns * 5 // 4)
    self._pause_ns = self._config.redial_ns if joined else longer_ns
    jitter = 500 + int(self._random.random() * 1000)  # permille of the pause
    self._redial_ns = max(self._redial_ns, now_ns + self._pause_ns * jitter // 1000)
    if joined and not (unproved or ending):
      goes_on = 'The learner still makes no step' if stuck else 'Training continues'
      self._out.say(f'syncer unreachable ({reason}). {goes_on}, nothing is lost. Retrying.')
