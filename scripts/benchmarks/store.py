"""What a store in a bucket costs: single objects, an outer step whose record is put there before it
is published, the copy of a checkpoint and its way back, the save of a learner.

    python scripts/benchmarks/store.py [--quick] [--json=FILE]     # two minutes

The bucket is tests/storage/fake_gcs.py, a process of its own on this machine, that waits 0, 10 or
50 ms before each answer; a folder on this disk takes turns with it. So the figures are of this code
and of round trips, not of a service: a real one has other latencies, and more bandwidth than this
fake, which is Python. Each line ends with the median over that without a store, or in the folder.

  outer step      by the classes of a real syncer (scale.py), with 4 learners, int8 both ways, one
                  fragment: from the merge to the record's commit; of it the log alone
  copy, fetch     a checkpoint of the syncer, as the background thread puts it, and back to an empty
                  disk; against copying and fsync on this disk
  save            of a learner: Orbax writes there, and the first save is read back
"""

import contextlib
import os
import pathlib
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2]))

import numpy as np

from diloco_jax.configs import own_loop
from diloco_jax.process import syncer as syncer_process
from diloco_jax.storage import checkpoint, json_files, states
from diloco_jax.storage import store as store_lib
from diloco_jax.syncer import stored
from scripts.benchmarks import measured, processes, scale

BUCKET = 'bucket'
DELAYS_MS = (0, 10, 50)
LEARNERS, MILLIONS = 4, 4  # of an outer step; Mi parameters, also of a checkpoint
SIZES = {'1 kB': 1 << 10, '1 MB': 1 << 20, '16 MB': 16 << 20}


@contextlib.contextmanager
def serve_bucket(delay_ms: int) -> Iterator[dict[str, str]]:
  """A fake that waits before each answer; the environment of its clients."""
  words = ['-m', 'tests.storage.fake_gcs', f'--bucket={BUCKET}', f'--delay-ms={delay_ms}']
  process = subprocess.Popen(
    [sys.executable, *words], cwd=processes.ROOT, stdout=subprocess.PIPE, encoding='utf-8'
  )
  try:
    variables = {}
    while (line := process.stdout.readline()).startswith('export '):
      name, value = shlex.split(line)[1].split('=', 1)
      variables[name] = value
    yield variables
  finally:
    process.kill()
    process.wait()


def seconds(call: Callable[[], object]) -> float:
  began_s = time.perf_counter()
  call()
  return time.perf_counter() - began_s


def objects(urls: dict[str, str], rounds: int) -> dict[str, dict[str, dict]]:
  """Milliseconds to put and to read an object, by place."""
  figures, places = {place: {} for place in urls}, {}
  for place, url in urls.items():
    with environment(place):
      places[place] = store_lib.Store(url)
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
    for (place, what), values in times.items():
      figures[place][f'{what} {size_name}'] = measured.spread(values)
  return figures


def outer_steps(stores: dict[str, str], folder: pathlib.Path, rounds: int) -> dict[str, dict]:
  """Milliseconds of an outer step and of its log, by place; '' is no store."""
  times_of, rigs = {}, {}
  with contextlib.ExitStack() as stack:
    for place, url in {'none': '', **stores}.items():
      with environment(place):
        store = stack.enter_context(open_store(url, folder / 'steps' / place))
        rig = scale.Rig(MILLIONS, folder / 'steps' / place / 'syncer', store=store)
      rigs[place] = stack.enter_context(contextlib.closing(rig))
      log, times = rig._log, times_of.setdefault(place, {'outer step': [], 'of it the log': []})
      log.write = time_calls(log.write, times['of it the log'])
    for turn in range(rounds + 1):
      for place, rig in rigs.items():
        times_of[place]['outer step'].append(1e3 * rig.outer_step(LEARNERS)['seconds'])
        if not turn:  # it compiles
          for times in times_of[place].values():
            times.clear()
  return {place: spreads(times) for place, times in times_of.items()}


def copies(stores: dict[str, str], folder: pathlib.Path, rounds: int) -> dict[str, dict]:
  """MB/s of a copy of a checkpoint, and of its way back."""
  values = np.random.default_rng(0).standard_normal((MILLIONS, scale.MILLION), np.float32)
  saved = checkpoint.Checkpoints(str(folder / 'saved'))
  saved.save(1, {f'w{n}': row for n, row in enumerate(values)}, 0)()
  saved.close()
  source = folder / 'saved' / '1'
  size = sum(size for _, size, _ in states.read(source).files) / 1e6
  speeds = {'none': {'copy': []}} | {place: {'copy': [], 'fetch': []} for place in stores}
  with contextlib.ExitStack() as stack:
    opened = {}
    for place, url in stores.items():
      with environment(place):
        opened[place] = stack.enter_context(open_store(url, folder / 'copies' / place))
    for turn in range(rounds):
      to = folder / f'local-{turn}'
      local = lambda: (shutil.copytree(source, to), json_files.fsync_tree(to))
      speeds['none']['copy'].append(size / seconds(local))
      for place, store in opened.items():
        name, back = f'copy-{turn}', folder / f'back-{place}-{turn}'
        put = lambda: states.put(store._store, name, source, lambda: None)
        speeds[place]['copy'].append(size / seconds(put))
        fetch = lambda: states.fetch(store._store, name, back)
        speeds[place]['fetch'].append(size / seconds(fetch))
  return {place: spreads(times) for place, times in speeds.items()}


def saves(stores: dict[str, str], folder: pathlib.Path, rounds: int) -> dict[str, dict]:
  """Milliseconds of a learner's save, to its end, and of it those in which its steps wait."""
  state = {f'w{n}': np.ones(scale.MILLION, np.float32) for n in range(MILLIONS)}
  figures = {}
  for place, url in {'none': str(folder / 'workdir'), **stores}.items():
    with environment(place):
      began, ended = [], []
      checkpoints = checkpoint.Checkpoints(f'{url}/islands/l0/ckpt')
      for step in range(rounds + 1):
        began_s = time.perf_counter()
        end = checkpoints.save(step, state, 0)
        began.append(1e3 * (time.perf_counter() - began_s))
        end()
        ended.append(1e3 * (time.perf_counter() - began_s))
      checkpoints.close()
      figures[place] = spreads({'save': ended[1:], 'of it the learner waits': began[1:]})
  return figures


def open_store(url: str, workdir: pathlib.Path) -> contextlib.AbstractContextManager:
  config = own_loop.get_config()
  config.train.store, config.train.store_log = url, bool(url)
  return stored.opened(config, workdir, lambda text: None)


def time_calls(call: Callable, times: list[float]) -> Callable:
  def timed_call(*args):
    began_s = time.perf_counter()
    call(*args)
    times.append(1e3 * (time.perf_counter() - began_s))

  return timed_call


def spreads(times: dict[str, list[float]]) -> dict[str, dict[str, float]]:
  return {what: measured.spread(values) for what, values in times.items()}


_environments: dict[str, dict[str, str]] = {}  # of the clients of a place


@contextlib.contextmanager
def environment(place: str) -> Iterator[None]:
  """While a store is opened; gcsfs, of a learner's saves, reads it at each request."""
  os.environ |= _environments.get(place, {})
  yield


def main() -> None:
  flags = measured.flags(__doc__)
  rounds = 5 if flags.quick else 20
  with contextlib.ExitStack() as stack:
    folder = pathlib.Path(stack.enter_context(tempfile.TemporaryDirectory()))
    urls = {'folder': str(folder / 'store')}
    for delay_ms in DELAYS_MS:
      _environments[f'{delay_ms} ms'] = stack.enter_context(serve_bucket(delay_ms))
      urls[f'{delay_ms} ms'] = f'gs://{BUCKET}/run'
    os.environ |= _environments['0 ms']  # before gcsfs is imported
    parts = {
      'objects, ms': (objects(urls, rounds), 'folder'),
      'outer steps, ms': (outer_steps(urls, folder, rounds), 'none'),
      'copies, MB/s': (copies(urls, folder, rounds // 4 + 1), 'none'),
      'saves, ms': (saves(urls, folder, rounds // 4 + 1), 'none'),
    }
  for title, (places, base) in parts.items():
    print(title)
    for place, figures in places.items():
      for what, spread in figures.items():
        ratio = spread['median'] / places[base].get(what, spread)['median']
        print(f'  {place:8} {what:24} {measured.text(spread):32} {ratio:.3g}')
  measured.write(flags.json, {title: places for title, (places, _) in parts.items()})


if __name__ == '__main__':
  syncer_process.prepare()
  main()
