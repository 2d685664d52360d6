"""The entry point of a learner's process: it builds a node on gRPC from the flags.

Errors that a retry cannot fix raise exits.NeverRetry (exit 42): a refused join, a folder that is
not writable or that another process of this learner has locked, a config that does not fit the
model, a checkpoint of another model. A failing or full disk gives exit 74 (exits.py), and so do
checkpoints that cannot be read: the cause may pass.
"""

import contextlib
import json
import os
import pathlib
import threading
import traceback
import zlib
from collections.abc import Callable, Iterator

import jax

from diloco_jax import version
from diloco_jax.certs import check as check_lib
from diloco_jax.certs import names, proofs
from diloco_jax.config import brought, build, load, run_config
from diloco_jax.learner import baseline
from diloco_jax.learner import hosts as hosts_lib
from diloco_jax.learner import node as learner_node
from diloco_jax.learner import work as learner_work
from diloco_jax.node import loop, ports
from diloco_jax.process import dial, exits, lifecycle, run_folder
from diloco_jax.protocol import actions, events, ids
from diloco_jax.report import records as records_lib
from diloco_jax.transport import addresses

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
    raise exits.NeverRetry(f'--learner={learner_id!r}: {ids.RULE}')
  config = config.of(learner_id)
  resolve = None
  if cluster is None or cluster.host == 0:
    with exits.never_retry(ValueError):
      resolve = None if address == 'none' else dial.resolver(address, access, config.train.store)
      dial.require_own_certificate(access, learner_id)
  with contextlib.ExitStack() as stack:
    hosts = 1
    if cluster is not None:
      hosts, work_class = stack.enter_context(connected_hosts(cluster, config)), hosts_lib.LeadWork
    devices = config.mesh.num_devices
    lifecycle.prepare_jax(devices // hosts, ahead=devices == 1)
    ended = _run(config, workdir, learner_id, resolve, access, work_class)
  return lifecycle.finish(*ended)


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
  folder, records = pathlib.Path(workdir).absolute(), hosts_lib.Quiet(learner_id)
  if leads:
    folder, records = lifecycle.open_folder(workdir, learner_id)
  records_lib.report_startup(records, 'imported')

  def stop(reason: str) -> None:
    stopped.set()
    event_queue.post(events.Stop(reason=reason))

  with lifecycle.recording_end(records), lifecycle.errors_as_exits():
    assembled = build.assemble(config)
    if leads and resolve is None:
      run_folder.write_config(folder, config)
      brought.begin(folder, assembled.things)
    elif leads:
      brought.require(load.brought(folder), assembled.things, assembled.things)
    island = learner_node.make_island(assembled, folder, learner_id, jax.devices())
    records_lib.report_startup(records, 'built')
    if access.tls and leads:  # every dial checks again: files may be renewed meanwhile
      for problem in check_lib.problems(access.tls, names.LEARNER, proofs.utc_now()):
        records.say(f'--tls={access.tls}: {problem}')
    with lifecycle.ending_on_signals(
      stop if leads else hosts_lib.ask_to_stop, config.train.drain_s, LEARNER_SAFE
    ):
      if not leads:
        return learner_node.run_led(assembled, island, folder, learner_id, records), records
      if resolve is None:
        return baseline.run(config, island, records, stopped.is_set), records
      connect = dial.dialer(assembled, resolve, access)
      ended = learner_node.run(
        assembled, island, folder, learner_id, event_queue, connect, records, work_class=work_class
      )
      return ended, records


@contextlib.contextmanager
def connected_hosts(cluster: hosts_lib.Cluster, config: run_config.Config) -> Iterator[int]:
  """Connects the hosts of a learner, which end together; yields their number."""
  with crashing_at_once():
    hosts = hosts_lib.connect(cluster)
    with exits.never_retry(RuntimeError):
      settings = json.dumps(config.to_dict()).encode()
      hosts_lib.require_same('diloco_jax', version.__version__)
      hosts_lib.require_same('the config', f'{zlib.crc32(settings):08x}')
    if config.mesh.num_devices % hosts:
      raise exits.NeverRetry(f'{config.mesh.num_devices} devices do not split over {hosts} hosts')
    yield hosts
    jax.distributed.shutdown()


@contextlib.contextmanager
def crashing_at_once() -> Iterator[None]:
  """Ends the process at once after an exception: jax would wait for the other hosts, which may wait
  for this one, until the heartbeat ends them all."""
  try:
    yield
  except (exits.NeverRetry, exits.DiskFailed, exits.NotInTime) as error:
    os._exit(exits.refuse(exits.one_line(error), error.code))
  except jax.errors.JaxRuntimeError as error:  # another host has ended, most likely
    os._exit(
      exits.refuse(f'a host of this learner is lost: {exits.one_line(error)}', exits.NOT_IN_TIME)
    )
  except BaseException as error:
    traceback.print_exc()
    os._exit(exits.refuse(exits.one_line(error), exits.NOT_IN_TIME))
