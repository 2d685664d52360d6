"""What a store in a bucket costs: single objects, an outer step whose record is put there before it
is published, a checkpoint of a learner, and the copy of one of the syncer.

    python scripts/benchmarks/store.py [--short] [--json=FILE]     # five minutes

The bucket is tests/storage/fake_gcs.py, a process of its own on this machine, that waits so many
milliseconds before each answer; a folder on this disk is measured beside it, in turns. So the
figures are of this code and of round trips, not of a service: a real one has other latencies, and
more bandwidth than this fake, which is Python. `outer step` is carried out by the classes of a real
syncer (scale.py) with 8 learners, int8 both ways, one fragment of 4 Mi parameters.
"""

import contextlib
import os
import pathlib
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

from diloco_jax.storage import store as store_lib
from scripts.benchmarks import measured, processes

BUCKET = 'bucket'
DELAYS_MS = (0, 10, 50)
SIZES = {'1 kB': 1 << 10, '1 MB': 1 << 20, '16 MB': 16 << 20}


@contextlib.contextmanager
def served(delay_ms: int) -> Iterator[dict[str, str]]:
  """A fake that waits before each answer; the environment of its clients."""
  words = ['-m', 'tests.storage.fake_gcs', f'--bucket={BUCKET}', f'--delay-ms={delay_ms}']
  process = subprocess.Popen(
    [sys.executable, *words], cwd=processes.ROOT, stdout=subprocess.PIPE, text=True
  )
  try:
    found = {}
    while (line := process.stdout.readline()).startswith('export '):
      name, value = shlex.split(line)[1].split('=', 1)
      found[name] = value
    yield found
  finally:
    process.kill()
    process.wait()


def seconds(call: Callable[[], object]) -> float:
  began_s = time.perf_counter()
  call()
  return time.perf_counter() - began_s


def objects(places: dict[str, store_lib.Store], rounds: int) -> dict[str, dict[str, dict]]:
  """Milliseconds to put and to read an object, by place."""
  found = {place: {} for place in places}
  for size_name, size in SIZES.items():
    data, times = os.urandom(size), {}
    for turn in range(rounds + 1):
      for place, store in places.items():
        name = f'objects/{size_name}/{turn}'
        put = seconds(lambda: store.put_new(name, data))
        read = seconds(lambda: store.read(name, size))
        if turn:  # the first one opens connections
          times.setdefault((place, 'put'), []).append(1e3 * put)
          times.setdefault((place, 'read'), []).append(1e3 * read)
    for (place, what), taken in times.items():
      found[place][f'{what} {size_name}'] = measured.spread(taken)
  return found


def main() -> None:
  flags = measured.flags(__doc__)
  rounds = 5 if flags.short else 20
  with contextlib.ExitStack() as stack:
    folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
    places = {'folder': store_lib.Store(str(folder / 'store'))}
    for delay_ms in DELAYS_MS:
      os.environ |= stack.enter_context(served(delay_ms))  # read when a store is opened
      places[f'{delay_ms} ms'] = store_lib.Store(f'gs://{BUCKET}/run')
    found = objects(places, rounds)
  for place, one in found.items():
    for what, spread in one.items():
      print(f'{place:8} {what:12} {measured.text(spread)} ms')
  measured.write(flags.json, found)


if __name__ == '__main__':
  main()
