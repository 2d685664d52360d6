"""The entry point of the learner processes, and what the syncer's (syncer_node.py) shares with it:
they build a node on gRPC from the flags and turn its end into an exit code.

Errors that a retry cannot fix raise cli.NeverRetry (exit 42): a refused join, a port in use, a
folder that is not writable or is locked by another syncer, a config that does not fit the model, a
checkpoint of another model, a damaged log. A failing or full disk gives exit 74 (cli.py), and
so do checkpoints that cannot be read: the cause may pass.
"""

import contextlib
import json
import math
import os
import pathlib
import signal
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Iterator

import jax
from jax.experimental.compilation_cache import compilation_cache

from diloco_jax import version
from diloco_jax.certs import check, names, proofs
from diloco_jax.config import build, run_config
from diloco_jax.launch import accelerators, cli, run_folder
from diloco_jax.learner import baseline
from diloco_jax.learner import hosts as hosts_lib
from diloco_jax.learner import process as learner_process
from diloco_jax.learner import work as learner_work
from diloco_jax.node import loop, ports
from diloco_jax.protocol import actions, events, ids, messages
from diloco_jax.report import records as records_lib
from diloco_jax.storage import checkpoint, files, json_files
from diloco_jax.storage import claim as claim_lib
from diloco_jax.storage import store as store_lib
from diloco_jax.transport import addresses, grpc_client, grpc_session, link

FILE = 'file:'
SPARE_SESSIONS = 16
MAX_ADDRESS_BYTES = 4096
CLAIM_TRUSTED_S = 300.0  # after the start of a learner
LEARNER_SAFE = (
  'Merged contributions and the last checkpoint are safe. Start the learner again: it continues '
  'from the checkpoint; the inner steps since then are lost.'
)


def learner(
  config: run_config.Config,
  workdir: str,
  learner_id: str,
  address: str,
  access: addresses.Access = addresses.LOCAL,
  work_class: type[learner_work.LearnerWork] = learner_work.LearnerWork,
  cluster: hosts_lib.Cluster | None = None,
) -> int:
  """Runs a learner process and returns its exit code. `cluster`: the hosts of a learner of several,
  of which this is one."""
  if not ids.is_learner(learner_id):
    raise cli.NeverRetry(f'--learner={learner_id!r}: {ids.RULE}')
  config = config.of(learner_id)
  resolve = None
  if cluster is None or cluster.host == 0:
    with cli.never_retry(ValueError):
      resolve = None if address == 'none' else resolver(address, access, config.train.store)
      require_own_certificate(access, learner_id)
  with contextlib.ExitStack() as stack:
    hosts = 1
    if cluster is not None:
      hosts, work_class = stack.enter_context(together(cluster, config)), hosts_lib.LeadWork
    devices = config.mesh.num_devices
    prepare_jax(devices // hosts, ahead=devices == 1)
    ended = _run(config, workdir, learner_id, resolve, access, work_class)
  return end(*ended)


def _run(
  config: run_config.Config,
  workdir: str,
  learner_id: str,
  resolve: Callable[[], str] | None,
  access: addresses.Access,
  work_class: type[learner_work.LearnerWork],
) -> tuple[actions.Exit, ports.Records]:
  """Runs the learner, or one of its hosts."""
  leads, stopped, event_queue = hosts_lib.leads(), threading.Event(), loop.EventQueue()
  folder, records = pathlib.Path(workdir).absolute(), hosts_lib.quiet(learner_id)
  if leads:
    folder, records = open_folder(workdir, learner_id)
  records_lib.report_startup(records, 'imported')

  def stop(reason: str) -> None:
    stopped.set()
    event_queue.post(events.Stop(reason=reason))

  with checkpoint_failures(), cli.never_retry(ValueError, files.DirectoryError):
    assembled = build.assemble(config)
    island = learner_process.make_island(assembled, folder, learner_id, jax.devices())
    records_lib.report_startup(records, 'built')
    if access.tls and leads:  # every dial checks again: files may be renewed meanwhile
      for problem in check.problems(access.tls, names.LEARNER, proofs.utc_now()):
        records.say(f'--tls={access.tls}: {problem}')
    node = assembled, island, folder, learner_id
    with stops(stop if leads else hosts_lib.ask_to_stop, config.train.drain_s, LEARNER_SAFE):
      if not leads:
        return learner_process.follow(*node, records), records
      if resolve is None:
        return baseline.run(config, island, records, stopped.is_set), records
      connect = dialer(assembled, resolve, access)
      how = {'work_class': work_class}
      return learner_process.run(*node, event_queue, connect, records, **how), records


@contextlib.contextmanager
def together(cluster: hosts_lib.Cluster, config: run_config.Config) -> Iterator[int]:
  """Connects the hosts of a learner, which end together; yields their number."""
  with at_once():
    hosts = hosts_lib.connect(cluster)
    with cli.never_retry(RuntimeError):
      settings = json.dumps(config.to_dict()).encode()
      hosts_lib.require_same('diloco_jax', version.__version__)
      hosts_lib.require_same('the config', f'{zlib.crc32(settings):08x}')
    if config.mesh.num_devices % hosts:
      raise cli.NeverRetry(f'{config.mesh.num_devices} devices do not split over {hosts} hosts')
    yield hosts
    jax.distributed.shutdown()


@contextlib.contextmanager
def at_once() -> Iterator[None]:
  """Ends the process at once after an exception: jax would wait for the other hosts, which may wait
  for this one, until the heartbeat ends them all."""
  try:
    yield
  except (cli.NeverRetry, cli.DiskFailed, cli.NotInTime) as error:
    os._exit(cli.refuse(cli.one_line(error), error.code))
  except jax.errors.JaxRuntimeError as error:  # another host has ended, most likely
    os._exit(cli.refuse(f'a host of this learner is lost: {cli.one_line(error)}', cli.NOT_IN_TIME))
  except BaseException as error:
    traceback.print_exc()
    os._exit(cli.refuse(cli.one_line(error), cli.NOT_IN_TIME))


def dialer(
  assembled: build.Assembly,
  resolve: Callable[[], str],
  access: addresses.Access,
) -> ports.MakeTransport:
  """Makes a learner's transport, which asks the learner to stop once the run has ended."""

  def make(post: ports.Post, payloads: ports.Payloads) -> ports.Transport:
    def address() -> str:
      try:
        return resolve()
      except addresses.RunEnded:
        post(events.Stop(reason=addresses.ENDED))
        raise

    # A learner on a slow link may owe the syncer a contribution of each fragment.
    least = limits(assembled, sum(assembled.payload_bytes))
    return grpc_client.GrpcLearnerTransport(address, post, payloads, least, access=access)

  return make


def limits(assembled: build.Assembly, owed_bytes: int = 0) -> link.Limits:
  """The limits of a transport. Two whole fragments at once go to a learner, and so many bytes of
  deltas (protocol/syncer/published.py); `owed_bytes` go to the syncer. Payloads may arrive after
  their announcements, since the two use separate streams. After a restart of the syncer all
  learners are strangers at once."""
  sync = assembled.config.sync
  wholes_bytes = messages.MAX_WHOLES * max(assembled.publish_bytes)
  deltas_bytes = messages.most_delta_bytes(assembled.payload_bytes)
  return link.Limits(
    contribution_bytes=assembled.payload_bytes,
    publish_bytes=assembled.publish_bytes,
    max_queued_bytes=max(link.Limits.max_queued_bytes, wholes_bytes + deltas_bytes, owed_bytes),
    max_announced=2 * sync.fragments + SPARE_SESSIONS,
    max_members=2 * sync.learners + SPARE_SESSIONS,
    max_strangers=sync.learners + 2 * SPARE_SESSIONS,
    member_s=sync.lease_s + link.Limits.handshake_s,
  )


def prepare_jax(devices: int, ahead: bool = False) -> None:
  """Emulates as many devices as the mesh needs. A CPU device computes at the dispatch of a program,
  but with `ahead` after it: programs with collectives have aborted when the host ran ahead of the
  emulated devices. Raises NeverRetry: jax finds no device, or does not compile."""
  if jax.config.jax_disable_jit:
    raise cli.NeverRetry(accelerators.NO_JIT)
  # A config of the user's may have imported jax before the variable was set.
  count = int(os.environ.get('JAX_NUM_CPU_DEVICES', devices))
  with contextlib.suppress(RuntimeError):  # in a notebook jax may have its devices already
    jax.config.update('jax_num_cpu_devices', count)
  jax.config.update('jax_cpu_enable_async_dispatch', ahead)
  keep_compiled()
  try:
    jax.local_devices()
  except Exception as error:  # of several types, also an AssertionError without a text
    raise cli.NeverRetry(accelerators.no_device(error)) from error


def keep_compiled() -> None:
  """Keeps compiled functions on disk for the next process, unless the user has chosen a folder."""
  if jax.config.jax_compilation_cache_dir is None:
    jax.config.update('jax_compilation_cache_dir', str(cli.cache_folder()))
    jax.config.update('jax_persistent_cache_min_compile_time_secs', 0.0)
    jax.config.update('jax_persistent_cache_min_entry_size_bytes', -1)
    compilation_cache.reset_cache()  # else, after a first compilation, it stays off


def open_folder(workdir: str, name: str) -> tuple[pathlib.Path, records_lib.Recorder]:
  folder = pathlib.Path(workdir).absolute()
  try:
    run_folder.claim(folder)
    return folder, records_lib.Recorder(folder, name)
  except ValueError as error:
    raise cli.NeverRetry(cli.one_line(error)) from error
  except OSError as error:
    raise cli.refusal(error)(
      f'cannot write to --workdir={workdir}: {error.strerror}. Nothing was started. Make space, or '
      'choose a folder that this user may write to.'
    ) from error


def require_own_certificate(access: addresses.Access, learner: str) -> None:
  """Raises ValueError if a learner was given the certificate of another one."""
  if access.tls:
    check.require_learner(access.tls, learner, proofs.utc_now())


def shown(address: str) -> str:
  """The same for people: a file with its whole path, and whether it is there."""
  path = pathlib.Path(address.removeprefix(FILE)).absolute()
  if not address.startswith(FILE):
    return address
  return f'{FILE}{path}{"" if path.exists() else ", which is not there yet"}'


def resolver(address: str, access: addresses.Access, store: str = '') -> Callable[[], str]:
  """Returns a function that reads the syncer's address at each call: an address (addresses.py) or
  'file:PATH' of a file with one; it raises RunEnded if the file says so, or the claim in `store`.
  Raises ValueError if it is neither, the file is no regular one, or `access` is not enough."""
  if not isinstance(address, str):
    raise ValueError(f'syncer is {address!r}: give HOST:PORT, unix:PATH, or file:PATH of a file')
  # A syncer that continues a run that was over may start after its learners.
  trust_claim_s = time.monotonic() + CLAIM_TRUSTED_S if store else math.inf

  def dialled() -> str:
    if time.monotonic() >= trust_claim_s:
      with contextlib.suppress(store_lib.StoreError, claim_lib.Refused):
        held, _ = claim_lib.read(store_lib.Store(store, claim_lib.ANSWER_S))
        if held and held.over:
          raise addresses.RunEnded(f'{addresses.ENDED}: the claim in {store} says so')
    return address

  if not address.startswith(FILE):
    addresses.check(address, access)
    return dialled
  path = pathlib.Path(address.removeprefix(FILE))
  if path.exists():  # else the syncer starts later
    files.require_file(path)

  def read() -> str:
    data = json_files.read_bytes(path.resolve(), MAX_ADDRESS_BYTES)
    text = os.fsdecode(data).strip()  # may be a path
    if text == addresses.ENDED:
      raise addresses.RunEnded(f'{text}: {path} says so')
    return text

  return read


@contextlib.contextmanager
def checkpoint_failures() -> Iterator[None]:
  """Turns checkpoints that can be neither read nor written, and a store, into one line and exit
  code 74."""
  try:
    yield
  except (checkpoint.CheckpointError, store_lib.StoreError) as error:
    raise cli.DiskFailed(cli.one_line(error)) from error


@contextlib.contextmanager
def stops(
  stop: Callable[[str], None], drain_s: float, safe: str, code: int = cli.NOT_IN_TIME
) -> Iterator[None]:
  """SIGTERM, Ctrl-C and a closed terminal end the process in order; a second signal, half a second
  later, at once.

  Args:
    stop: asks the process to end; called with the reason, in the main thread, between any two
      instructions.
    drain_s: the time that an orderly end may take. After it the process exits with `code`.
    safe: the sentence that says which state is safe in that case.
  """
  requests = cli.EndRequests()
  timers: list[threading.Timer] = []

  def exit_late(name: str) -> None:
    with contextlib.suppress(OSError):  # the terminal is closed
      print(
        f'error: the process has not ended within {drain_s:g} s of {name} and exits now. {safe}',
        file=sys.stderr,
        flush=True,
      )
    os._exit(code)

  def handle(number: int, frame: object) -> None:
    del frame
    if not requests.add():
      return
    if requests.count > 1:
      os._exit(128 + number)
    name = signal.Signals(number).name
    timers.append(grpc_session.start_timer(drain_s, exit_late, name))
    stop('preempted' if number == signal.SIGTERM else f'stopped by {name}')

  before = {number: signal.signal(number, handle) for number in cli.end_signals()}
  try:
    yield
  finally:
    for timer in timers:
      timer.cancel()
    for number, handler in before.items():
      signal.signal(number, handler)


def end(result: actions.Exit, records: records_lib.Recorder) -> int:
  for refusal in (cli.NeverRetry, cli.NotInTime):
    if result.code == refusal.code:
      records.close()
      raise refusal(result.text)
  records.say(result.text)
  if isinstance(records, records_lib.Recorder):  # there may be no supervisor
    records.ended(result.code)
  records.close()
  return result.code
