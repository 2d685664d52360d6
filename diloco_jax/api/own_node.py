"""The node of a learner that a loop drives."""

import contextlib
import pathlib
from collections.abc import Callable
from concurrent import futures
from typing import NamedTuple

import jax

from diloco_jax.api import admission as admission_lib
from diloco_jax.api import own_arrays
from diloco_jax.config import build
from diloco_jax.learner import hosts as hosts_lib
from diloco_jax.learner import moments as moments_lib
from diloco_jax.learner import node as learner_node
from diloco_jax.learner import work as learner_work
from diloco_jax.node import loop, ports
from diloco_jax.protocol import actions, events
from diloco_jax.report import header
from diloco_jax.report import records as records_lib
from diloco_jax.storage import folders
from diloco_jax.transport import payloads as payloads_lib


class LoopNode(NamedTuple):
  """The node of a learner, as its loop uses it.

  Attributes:
    work: carries out what the machine asks for between two steps.
    post: sends the machine an event.
    fail: ends the node with an error.
    say: prints a line.
    ended: how the machine has ended.
    restored_step: of the checkpoint that the moments come from, None: there is none.
  """

  work: learner_work.LearnerWork
  post: Callable[[events.Event], None]
  fail: Callable[[BaseException], None]
  say: Callable[[str], None]
  ended: futures.Future[actions.Exit]
  restored_step: int | None


def begin(
  arrays: own_arrays.OwnArrays,
  assembled: build.Assembly,
  run: str,
  learner: str,
  folder: pathlib.Path,
  saves: bool,
  connect: ports.MakeTransport,
  wait_s: float,
  cleanup: contextlib.ExitStack,
) -> LoopNode:
  """Begins the node of a learner, or of one of its hosts, until `cleanup`.

  Args:
    run: its name, '': it begins.
    folder: for its tape, its records and its checkpoints.
    saves: whether its moments are saved, and begin with saved ones.
    wait_s: how long the syncer has to admit it.
  """
  say = lambda text: header.say(f'[{learner}] {text}')
  restored = None
  if saves and arrays.moments is not None:
    restored = cleanup.enter_context(arrays.saving(folder, learner, assembled.config, run, say))
  if not hosts_lib.leads():
    return _led(arrays, assembled, learner, restored, cleanup)
  event_queue, payloads = loop.EventQueue(), payloads_lib.PayloadStore()
  own = restored if restored is not None and restored.learner == learner else None
  store = folders.of_learners(folder, assembled.config.train.store)
  origin = restored, moments_lib.describe(restored, store, 'the opt_state that join was given')
  records = cleanup.enter_context(
    contextlib.closing(records_lib.Recorder(folder, learner, prefix=f'[{learner}] '))
  )
  cleanup.push(lambda kind, *_: records.ended(int(issubclass(kind or int, Exception))))
  records_lib.report_startup(records, 'restored')
  if own:
    records.say(f'{learner} continues with the moments of its checkpoint at step {own.step}')
  work_class = hosts_lib.LeadWork if jax.process_count() > 1 else learner_work.LearnerWork
  work = work_class(assembled, arrays, event_queue.post, event_queue.fail, payloads, records)
  work.exchange.compile_all()
  records_lib.report_startup(records, 'compiled')
  hosts_lib.wait_until_ready()
  admission = admission_lib.Admission(learner, event_queue, wait_s)
  cleanup.callback(admission.cancel)
  cleanup.enter_context(work.run_threads())
  ended = cleanup.enter_context(
    learner_node.running_node(
      assembled,
      work,
      folder,
      learner,
      own.protocol if own else None,
      event_queue,
      lambda post, payloads: connect(admission.begin(post), payloads),
      payloads,
      records,
      None if own or arrays.moments is None else origin,
    )
  )
  return LoopNode(
    work, event_queue.post, event_queue.fail, records.say, ended, restored and restored.step
  )


def _led(
  arrays: own_arrays.OwnArrays,
  assembled: build.Assembly,
  learner: str,
  restored: moments_lib.SavedMoments | None,
  cleanup: contextlib.ExitStack,
) -> LoopNode:
  """The node of a host that does not lead: it has no machine."""
  records = hosts_lib.Quiet(learner)
  work = hosts_lib.LedWork(assembled, arrays, records)
  work.exchange.compile_all()
  hosts_lib.wait_until_ready()
  cleanup.enter_context(work.run_threads())
  if restored is None or restored.learner != learner:
    work.exchange.digests()  # as for the tape of the lead
  ended: futures.Future[actions.Exit] = futures.Future()
  ended.set_result(hosts_lib.ENDED_BY_LEAD)
  nowhere = lambda event: None
  return LoopNode(work, nowhere, nowhere, records.say, ended, restored and restored.step)
