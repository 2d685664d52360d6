"""The ways of outer_round.py that need PyTorch; an environment of their own runs this file.

torch    torch.distributed.all_reduce of the float32 values over gloo
torchft  torchft's DiLoCo: a quorum from its lighthouse, an all-reduce of the float32
         pseudo-gradients over gloo, a vote whether to commit, the outer step in each process;
         in one fragment, or in four that are synchronised one after the other

Each process has one thread for arithmetic: with more, a round of torchft takes three times as long
on two cores. The environment has neither jax nor grpcio, so this file imports nothing of the
project; sizes and flags are those of outer_round.py.
"""

import argparse
import datetime
import os
import sys
import time
from collections.abc import Iterator
from multiprocessing import connection

import torch
import torch.distributed

LEARNERS, HOST = 4, '127.0.0.1'
WIDTH, ARRAYS = 1024, 24
LIMIT = datetime.timedelta(seconds=600)

Rounds = Iterator[tuple[float, float]]  # when this process held its values, and when the result


def gloo(flags: argparse.Namespace) -> Rounds:
  torch.distributed.init_process_group(
    'gloo', f'tcp://{flags.address}', rank=flags.index, world_size=LEARNERS, timeout=LIMIT
  )
  values = torch.full((ARRAYS * WIDTH * WIDTH,), float(flags.index))
  for _ in range(flags.rounds):
    values.fill_(float(flags.index))
    holds = time.monotonic()
    torch.distributed.all_reduce(values)
    yield holds, time.monotonic()
  torch.distributed.destroy_process_group()


def torchft(flags: argparse.Namespace) -> Rounds:
  from torchft import local_sgd, manager, process_group

  fragments = int(flags.variant)
  torch.manual_seed(0)
  layers = [torch.nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(ARRAYS)]
  model, each = torch.nn.Sequential(*layers), ARRAYS // fragments
  store = torch.distributed.TCPStore(HOST, 0, is_master=True, wait_for_workers=False)
  managed = manager.Manager(
    pg=process_group.ProcessGroupGloo(timeout=LIMIT),
    load_state_dict=model.load_state_dict,
    state_dict=model.state_dict,
    min_replica_size=LEARNERS,
    use_async_quorum=False,
    replica_id=f'l{flags.index}',
    store_addr=HOST,
    store_port=store.port,
    rank=0,
    world_size=1,
    lighthouse_addr=f'http://{flags.address}',
    hostname=HOST,
    timeout=LIMIT,
  )
  inner = torch.optim.SGD(model.parameters(), lr=1.0)  # without gradients its step does nothing
  parts = [torch.nn.Sequential(*layers[n : n + each]) for n in range(0, ARRAYS, each)]
  outer = [
    torch.optim.SGD(part.parameters(), lr=0.7, momentum=0.9, nesterov=True) for part in parts
  ]
  with local_sgd.DiLoCo(managed, parts, inner, outer, sync_every=fragments, pin_memory=False):
    for _ in range(flags.rounds):
      with torch.no_grad():
        for leaf in model.parameters():
          leaf.add_(torch.randn_like(leaf), alpha=1e-3)
      holds = time.monotonic()
      for _ in range(fragments):
        inner.step()
      yield holds, time.monotonic()
  assert managed.current_step() == flags.rounds * fragments, 'a round was not committed'
  managed.shutdown(wait=False)


def serve_torchft(address: str) -> None:
  """The lighthouse, until its input closes."""
  from torchft import coordination

  lighthouse = coordination.LighthouseServer(bind=address, min_replicas=LEARNERS)
  sys.stdin.read()
  lighthouse.shutdown()


def main() -> None:
  parser = argparse.ArgumentParser(description=__doc__)
  for name in ('way', 'variant', 'address'):
    parser.add_argument(f'--{name}', default='')
  for name in ('index', 'rounds', 'pipe'):
    parser.add_argument(f'--{name}', type=int, default=0)
  flags = parser.parse_args()
  os.environ.setdefault('GLOO_SOCKET_IFNAME', 'lo')
  torch.set_num_threads(1)
  if flags.way == 'serve_torchft':
    serve_torchft(flags.address)
    return
  run = {'torch': gloo, 'torchft': torchft}[flags.way]
  pipe = connection.Connection(flags.pipe)
  for moments in run(flags):
    pipe.send(moments)
    pipe.recv()


if __name__ == '__main__':
  main()
