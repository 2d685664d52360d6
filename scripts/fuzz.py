"""Feeds decoders with mutated bytes for a while; what breaks one is kept in tests/corpus.

python scripts/fuzz.py MINUTES [TARGET ...]   # tests/transport/fuzzing.py has the targets

With atheris (pip install atheris) the mutations follow the branches that they reach; without it
they are those of the tests. The exit code is 1 if an input broke a decoder.
"""

import pathlib
import random
import subprocess
import sys
import tempfile
import time

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

try:
  import atheris
except ImportError:
  atheris = None

if atheris is None:
  from tests.transport import fuzzing
else:
  with atheris.instrument_imports(include=['diloco_jax']):
    from tests.transport import fuzzing


def breaks(target: fuzzing.Target, data: bytes) -> bool:
  """Whether these bytes break a decoder; then they are kept."""
  try:
    target.run(data)
  except Exception as error:
    path = fuzzing.remember(target, data)
    print(f'{target.name}: {type(error).__name__}: {str(error)[:200]!r} for {path}', flush=True)
    return True
  return False


def fuzz_plainly(target: fuzzing.Target, seconds: float) -> int:
  """Returns 1 if an input broke the decoder."""
  seed, runs, end_s = random.randrange(2**32), 0, time.monotonic() + seconds
  for data in target.mutants(random.Random(seed)):
    runs += 1
    if breaks(target, data):
      return 1
    if time.monotonic() > end_s:
      break
  print(f'{target.name}: {runs:,} inputs from seed {seed}', flush=True)
  return 0


def fuzz_with_atheris(target: fuzzing.Target, seconds: float) -> None:
  """Ends the process: exit code 1 if an input broke the decoder."""

  def run(data: bytes) -> None:
    if breaks(target, data):
      raise RuntimeError(f'{target.name} is broken')

  def mutated(data: bytes, most: int, seed: int) -> bytes:
    mutant = target.mend(atheris.Mutate(data, most)) if seed % 4 else next(mutants)
    return mutant[:most]

  mutants = target.mutants(random.Random())
  with tempfile.TemporaryDirectory() as corpus:
    for number, data in enumerate((*target.examples, *target.remembered())):
      (pathlib.Path(corpus) / str(number)).write_bytes(data)
    flags = [
      f'-max_total_time={max(1, round(seconds))}',
      f'-artifact_prefix={corpus}/',  # `remember` keeps what it finds
      '-max_len=200000',
      '-verbosity=0',
    ]
    atheris.Setup([sys.argv[0], *flags, corpus], run, custom_mutator=mutated)
    atheris.Fuzz()


def fuzz(name: str, seconds: float) -> int:
  """Fuzzes one target in this process."""
  with tempfile.TemporaryDirectory() as workdir:
    target = fuzzing.targets(pathlib.Path(workdir))[name]
    if atheris is None:
      return fuzz_plainly(target, seconds)
    fuzz_with_atheris(target, seconds)
  return 0


def main(argv: list[str]) -> int:
  if argv[:1] == ['--one']:
    return fuzz(argv[1], float(argv[2]))
  if not argv or not argv[0].replace('.', '', 1).isdigit():
    print(__doc__)
    return 2
  names = argv[1:] or list(fuzzing.targets(pathlib.Path()))
  seconds = 60 * float(argv[0]) / len(names)
  print(
    f'{len(names)} targets, {seconds:.0f} s each, with {"atheris" if atheris else "no atheris"}'
  )
  # Each in a process of its own: atheris ends the process that it fuzzes in.
  command = [sys.executable, __file__, '--one']
  codes = [subprocess.run([*command, name, str(seconds)]).returncode for name in names]
  return int(any(codes))


if __name__ == '__main__':
  sys.exit(main(sys.argv[1:]))
