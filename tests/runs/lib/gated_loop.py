"""The loop of experiments/examples/loop_linen.py, which waits at batch GATE until a file exists.

python tests/runs/lib/gated_loop.py FILE LEARNER SYNCER
"""

import importlib.util
import pathlib
import sys
import threading
import time

EXAMPLES = pathlib.Path(__file__).resolve().parents[3] / 'experiments' / 'examples'
GATE, DEADLINE_S = 100, 100


def example(name: str):
  """The module of an example."""
  spec = importlib.util.spec_from_file_location(name, EXAMPLES / f'{name}.py')
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  return module


def until(what, deadline_s: float = DEADLINE_S) -> None:
  """Waits until `what()` is true; raises TimeoutError."""
  end_s = time.monotonic() + deadline_s
  while not what():
    if time.monotonic() > end_s:
      raise TimeoutError(f'not within {deadline_s} s')
    threading.Event().wait(0.05)


def main(file: str, learner: str, syncer: str) -> None:
  loop = example('loop_linen')
  read, batches = loop.read, []

  def gated(shard: int, index: int):
    batches.append(index)
    if len(batches) == GATE:
      until(pathlib.Path(file).exists)
    return read(shard, index)

  loop.read = gated
  losses = loop.train(learner=learner, syncer=syncer)
  print(f'{len(losses)} steps, the mean loss of the last 20 is {sum(losses[-20:]) / 20:.2f}')


if __name__ == '__main__':
  main(*sys.argv[1:])
