"""Builds the node of one learner from its ports and runs it to its end.

Besides the threads of the transport there are two: the caller's thread runs the steps (work), and
another runs the machine, which handles heartbeats, pulls and publishes while a step runs. Work has
more for what must not delay a step (work.py).
"""

import contextlib
import fcntl
import os
import pathlib
import secrets
import time
from collections.abc import Iterator, Sequence
from concurrent import futures
from typing import Any

import jax

from diloco_jax.config import build
from diloco_jax.learner import baseline, on_device
from diloco_jax.learner import hosts as hosts_lib
from diloco_jax.learner import moments as moments_lib
from diloco_jax.learner import work as learner_work
from diloco_jax.node import loop, ports, threads
from diloco_jax.protocol import actions, facts
from diloco_jax.protocol.learner import machine as learner_machine
from diloco_jax.protocol.tape import tape as tape_lib
from diloco_jax.report import facts as report_facts
from diloco_jax.report import header
from diloco_jax.report import records as records_lib
from diloco_jax.storage import checkpoint, folders, tapes
from diloco_jax.storage import files as files_lib
from diloco_jax.storage import store as store_lib
from diloco_jax.train import island as island_lib
from diloco_jax.transport import payloads as payloads_lib

Origin = tuple[moments_lib.SavedMoments | None, str]  # whose moments, and the line about them


class LearnerRecords:
  """The learner's records, with curves of its adoptions (node.ports.Records), and the origin of
  the moments once a process without a checkpoint joins a run in progress."""

  def __init__(
    self, records: records_lib.Recorder, origin: Origin | None, late: int = 0, store: str = ''
  ):
    """`late`: at clocks beyond it fresh moments cost something. `store`: of the run."""
    self._records, self._late, self._store = records, late, store
    self._origin = origin
    self.say = records.say

  def report(self, fact: facts.Fact) -> None:
    self._records.report(fact)
    if isinstance(fact, facts.State) and fact.state == 'joined':
      self.say(f'joined the run at clock {fact.clock}')
      origin, self._origin = self._origin, None
      if origin and (origin[0] or fact.clock > self._late):
        saved, text = origin
        if not saved and folders.is_away(self._store):
          raise store_lib.StoreError(
            f'{self._store} is away: the run has begun, and nothing of it is there. Is its file '
            'system mounted? Nothing was made there. Start again once it is back'
          )
        of, step = (saved.learner, saved.step) if saved else ('', 0)
        self._records.report(report_facts.Moments(clock=fact.clock, of=of, step=step))
        self._records.say(text)
    if isinstance(fact, facts.Adopted) and not fact.whole:
      self._records.scalars(
        fact.clock,
        {
          'sync/inner_steps_between_syncs': fact.steps_between,
          'sync/staleness': fact.staleness,
        },
      )


def make_island(
  assembled: build.Assembly,
  workdir: pathlib.Path,
  learner_id: str,
  devices: Sequence[jax.Device],
) -> island_lib.Island:
  """Makes the island of a learner; its checkpoints are under WORKDIR/islands/ID, or of a run with a
  store under STORE/islands/ID."""
  config = assembled.config
  place = folders.of_learners(workdir, config.train.store)
  return island_lib.Island(
    task=assembled.task,
    optimizer=config.optimizer,
    mesh=config.mesh,
    total_steps=config.train.steps,
    devices=devices,
    seed=config.train.seed,
    checkpoint_dir=str(moments_lib.folder(workdir, learner_id)),
    saves_to=str(moments_lib.folder(place, learner_id)),
    store=config.train.store,
    keep_every=config.sync.keep_every,
  )


def run(
  assembled: build.Assembly,
  island: island_lib.Island,
  workdir: pathlib.Path,
  learner_id: str,
  event_queue: loop.EventQueue,
  make_transport: ports.MakeTransport,
  records: records_lib.Recorder,
  own_process: bool = True,
  work_class: type[learner_work.LearnerWork] = learner_work.LearnerWork,
) -> actions.Exit:
  """Runs a learner until the run is over or a Stop arrives; steps run on this thread.

  A learner that comes back takes fragments, clock and data shard from the syncer, and the moments
  of its inner optimizer from a checkpoint (moments.py). Its tape is written to `workdir`.
  `own_process`: neither the syncer nor another island shares this process.
  """
  with contextlib.closing(island):
    restored, origin = _restore(assembled, island, workdir, learner_id, records)
    payloads = payloads_lib.PayloadStore()
    exchange = on_device.Exchange(assembled, island, in_process=not own_process).begin()
    work = work_class(
      assembled, island, event_queue.post, event_queue.fail, payloads, records, exchange
    )
    if restored is not None:
      records.say(f'{learner_id} continues from its checkpoint at clock {restored.step}')
    began_s = time.monotonic()
    learner_work.introduce(island, records)
    if own_process:
      _compile(island, work, restored)
    else:  # islands of one process have different devices and share no compiled functions
      island.warm_up()
    records_lib.report_startup(records, 'compiled')
    records.say(f'compiled in {header.duration(time.monotonic() - began_s)}')
    state = None if restored is None else restored.protocol
    with running_node(
      assembled,
      work,
      workdir,
      learner_id,
      state,
      event_queue,
      make_transport,
      payloads,
      records,
      origin,
    ) as ended:
      work.run()
  return ended.result()


def run_led(
  assembled: build.Assembly,
  island: island_lib.Island,
  workdir: pathlib.Path,
  learner_id: str,
  records: ports.Records,
) -> actions.Exit:
  """Runs a host that does not lead, as `run` runs the lead, until the lead ends the work."""
  with contextlib.closing(island):
    restored, _ = _restore(assembled, island, workdir, learner_id, records)
    work = hosts_lib.LedWork(assembled, island, records)
    _compile(island, work, restored)
    if restored is None:
      work.exchange.digests()  # as for the tape of the lead
    work.run()
  return hosts_lib.ENDED_BY_LEAD


def _restore(
  assembled: build.Assembly,
  island: island_lib.Island,
  workdir: pathlib.Path,
  learner_id: str,
  records: records_lib.Recorder,
) -> tuple[checkpoint.Restored | None, Origin | None]:
  """Restores the newest checkpoint of the island, else the moments of another learner."""
  restored, origin = island.restore(), None
  if restored is not None and baseline.is_state(restored.protocol):
    raise ValueError(
      'the checkpoints in this folder are of a learner without a syncer. Nothing was changed: '
      "continue it with --syncer=none (syncer='none'), or choose another folder"
    )
  if restored is None:
    place = folders.of_learners(workdir, assembled.config.train.store)
    saved = moments_lib.find(place, learner_id, island.moments, records.say)
    if saved is None and place != workdir:  # the run may have got its store only now
      saved = moments_lib.find(workdir, learner_id, island.moments, records.say)
    if saved is not None:
      island.moments, saved = saved.moments, saved._replace(moments=None)
    origin = saved, moments_lib.describe(saved, place, 'fresh moments')
  from_step = origin[1] if restored is None else f'checkpoint {restored.step}'
  hosts_lib.require_same('the state', from_step)
  records_lib.report_startup(records, 'restored')
  return restored, origin


def _compile(
  island: island_lib.Island, work: learner_work.LearnerWork, restored: checkpoint.Restored | None
) -> None:
  # The lead alone takes a turn: on emulated devices the hosts cannot share compiled functions.
  with _compile_in_turn() if jax.process_index() == 0 else contextlib.nullcontext():
    island.warm_up()
    # After a restore the functions are in the cache, and training begins before; but not on a host
    # for which others would wait.
    if restored is None or jax.process_count() > 1:
      work.exchange.compile_all()
  hosts_lib.wait_until_ready()


@contextlib.contextmanager
def running_node(
  assembled: build.Assembly,
  work: learner_work.LearnerWork,
  workdir: pathlib.Path,
  learner_id: str,
  state: dict[str, Any] | None,
  event_queue: loop.EventQueue,
  make_transport: ports.MakeTransport,
  payloads: payloads_lib.PayloadStore,
  records: records_lib.Recorder,
  origin: Origin | None,
) -> Iterator[futures.Future[actions.Exit]]:
  """Runs the machine on its own thread; the body of the `with` carries out the work until the
  machine has exited. `state`: the machine state of a checkpoint, None for version 0."""
  transport, config = make_transport(event_queue.post, payloads), assembled.config
  warmup = config.optimizer.warmup_steps if assembled.task else 0  # a user's loop has its own
  identity = learner_machine.Identity(
    learner=learner_id,
    nonce=transport.nonce,
    agreement=assembled.agreement,
    host=files_lib.host_name(),
    pid=os.getpid(),
    seed=secrets.randbits(32),
  )
  start = tape_lib.Start(
    role='learner',
    node=learner_id,
    config=assembled.protocol,
    identity=identity,
    digests=work.exchange.digests() if state is None else None,
    state=state,
  )
  tape = tapes.Tape(workdir, start, records.say, config.to_dict())
  node = loop.Node(
    start.make(),
    event_queue,
    loop.Monotonic(),
    transport,
    work,
    payloads,
    LearnerRecords(records, origin, max(2 * config.sync.period, warmup), config.train.store),
    tape,
  )
  ended: futures.Future[actions.Exit] = futures.Future()
  thread = threads.Thread(target=_run_node, args=(node, work, tape, ended), name='node')
  try:
    thread.start()
    yield ended
    thread.join()
  except BaseException as error:  # else the node would go on, and hold its arrays and its seat
    event_queue.fail(error)
    thread.join()
    raise
  finally:
    transport.shutdown(ports.SHUTDOWN_S)


def _run_node(
  node: loop.Node,
  work: learner_work.LearnerWork,
  tape: tapes.Tape,
  ended: futures.Future[actions.Exit],
) -> None:
  end = None
  try:
    ended.set_result(end := node.run())
  except BaseException as error:  # raised again on the step thread, which must end too
    ended.set_exception(error)
  finally:
    work.stop()
    tape.close()
  if end and end.abandons:
    work.abandon(end)


@contextlib.contextmanager
def _compile_in_turn() -> Iterator[None]:
  """Locks the compilation cache, so that the learners of a run compile in turn: the first
  compiles the functions and the others read them. Learners that start together with an empty cache
  would each compile all of them. The kernel frees the lock if the process dies; without a cache
  that can be written there is no lock."""
  with contextlib.ExitStack() as stack:
    if jax.config.jax_enable_compilation_cache and (folder := jax.config.jax_compilation_cache_dir):
      path = pathlib.Path(folder) / '.turn'
      with contextlib.suppress(OSError):  # jax goes on without a cache, too
        path.parent.mkdir(parents=True, exist_ok=True)
        file = stack.enter_context(open(path, 'w', encoding='utf-8'))
        fcntl.flock(file, fcntl.LOCK_EX)
    yield
