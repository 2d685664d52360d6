"""Which learner a user's loop is, and its wait for the syncer to admit it."""

import contextlib
import pathlib
import re
import secrets
import threading
from typing import Any

from diloco_jax.certs import check as check_lib
from diloco_jax.certs import names, proofs
from diloco_jax.config import run_config
from diloco_jax.learner import hosts as hosts_lib
from diloco_jax.node import loop, ports
from diloco_jax.process import bring, own_model
from diloco_jax.protocol import agreement as agreement_lib
from diloco_jax.protocol import events, ids, messages, safe_json
from diloco_jax.storage import files as files_lib
from diloco_jax.transport import addresses

NAMES = 'names'  # in a workdir: a folder for each id that was chosen there, with its lock


def meet(
  model: own_model.ModelDescription, config: run_config.Config, *where: Any
) -> own_model.Terms | int:
  """Brings the model to a syncer that has none; returns its terms, or T of a run that has ended. Of
  several hosts the lead calls for all. Raises ValueError for another model or setting, and as
  `bring.bring`, whose arguments follow. Settings of `config` that are not 0, or in `sync` not the
  default, must be the syncer's."""
  answer = b''
  default = own_model.config(0, run_config.SyncConfig(), 0).agreement().items()
  required = dict(config.agreement().items() - default) | _arrays(model)
  try:
    for sent in (own_model.NO_MODEL, model) if hosts_lib.leads() else ():
      answer = bring.bring(sent, *where)
      terms = own_model.Terms.decode(answer)
      shared = terms.applied_to(config)
      known = own_model.from_header(terms.model, dict) if terms.model else model
      here = agreement_lib.encode(shared.agreement() | required)
      syncers = agreement_lib.encode(safe_json.parse_object(terms.settings) | _arrays(known))
      if refusal := agreement_lib.refusal(here, syncers):
        raise ValueError(refusal)
      if terms.model:
        break
      own_model.complete(model, shared)
  except addresses.RunEnded as ended:
    answer = str(ended.total_steps).encode()
  answer = hosts_lib.broadcast_text(answer.decode())
  return int(answer) if answer.isdecimal() else own_model.Terms.decode(answer.encode())


def _arrays(model: own_model.ModelDescription) -> dict[str, str]:
  shapes = {name: f'{leaf.dtype}{list(leaf.shape)}' for name, leaf in model.shapes.items()}
  return {f'array {name}': f'{shape}, {model.labels[name]}' for name, shape in shapes.items()}


def choose(workdir: pathlib.Path, access: addresses.Access, cleanup: contextlib.ExitStack) -> str:
  """The id of a learner that was given none: that of its certificate; else one that an ended
  process of this workdir had, so that a process that returns is the same learner; else a new one.
  Locked until `cleanup`. Raises ValueError; DirectoryError."""
  if access.tls:
    return check_lib.read(access.tls, names.LEARNER, proofs.utc_now()).proof.name.id
  host = re.sub('[^a-z0-9]+', '-', files_lib.host_name().lower())[:40].strip('-')
  new = f'{host}-{secrets.token_hex(3)}'.lstrip('-')
  known = sorted(path.name for path in (workdir / NAMES).glob('*') if ids.is_learner(path.name))
  for name in known:
    with contextlib.suppress(files_lib.DirectoryError):  # a live process has it
      return _lock(workdir, name, cleanup)
  return _lock(workdir, new, cleanup)


def _lock(workdir: pathlib.Path, name: str, cleanup: contextlib.ExitStack) -> str:
  with contextlib.ExitStack() as held:
    held.enter_context(contextlib.closing(files_lib.Files(workdir / NAMES / name))).lock('learner')
    cleanup.push(held.pop_all())
  return name


class Admission:
  """The wait of a learner for the syncer to admit it. After `wait_s` its node fails: a run that has
  ended sends nothing."""

  def __init__(self, learner: str, event_queue: loop.EventQueue, wait_s: float):
    self._learner, self._event_queue, self._wait_s = learner, event_queue, wait_s
    self._timer = threading.Timer(min(wait_s, threading.TIMEOUT_MAX), self._give_up)
    self._timer.daemon = True
    self._refused = 0  # the session of the last refusal
    self._reason = 'no syncer has answered'

  def begin(self, post: ports.Post) -> ports.Post:
    """Begins the wait, which what is posted ends."""
    self._timer.start()

    def watched(event: events.Event) -> None:
      self._watch(event)
      post(event)

    return watched

  def cancel(self) -> None:
    self._timer.cancel()

  def _watch(self, event: events.Event) -> None:
    match event:
      case events.Received(message=messages.Heartbeat() | messages.Joined()) | events.Stop():
        self._timer.cancel()  # a syncer sends heartbeats to members only
      case events.Received(session=session, message=messages.Refused(text=text)):
        self._refused, self._reason = session, text
      case events.Disconnected(session=session, reason=reason) if session != self._refused:
        self._reason = reason

  def _give_up(self) -> None:
    self._event_queue.fail(
      TimeoutError(
        f'no syncer has admitted learner {self._learner} within {self._wait_s:g} s: '
        f'{self._reason}. If the run has ended, it takes no more learners'
      )
    )
