"""The phases of scripts/accelerator.sh, the most informative first.

  processes   a syncer on the CPU and learners in processes that share the GPU; one is killed
  beside      a learner of 120M parameters beside its syncer, against the same learner alone
  single      two islands in one process on the same device: payloads never leave it

Each phase has a limit of time and writes its figures to FOLDER/figures.json (default
runs/accelerator) as soon as it has them, so a run that is cut off counts, too. Together they take
at most seven minutes. --rehearse: the same with tiny models on the CPU, in three minutes.
docs/accelerators.md has what has run so far.
"""

import argparse
import importlib
import importlib.metadata
import os
import pathlib
import signal
import subprocess
import sys
import tempfile
import time
import tomllib

from scripts.accelerator import figures

ROOT = pathlib.Path(__file__).resolve().parents[2]
LIMITS_S = {'processes': 190, 'beside': 130, 'single': 60}
TOTAL_S = 380  # of seven minutes; the rest is the start, and the end of what is cut off
MERCY_S = 5  # from SIGTERM to SIGKILL


def environment(phase: str, folder: str, rehearse: bool) -> dict[str, str]:
  """The environment of a phase. Its processes share one cache, new and complete, and say what they
  compile; none reserves memory of the device, which three learners share in `processes`."""
  return {
    'JAX_PLATFORMS': 'cpu' if rehearse else 'cuda,cpu',
    **({'JAX_DISABLE_MOST_OPTIMIZATIONS': '1'} if rehearse else {}),  # compiles in half the time
    **os.environ,
    'JAX_COMPILATION_CACHE_DIR': f'{folder}/cache',
    'JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS': '0',
    'JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES': '-1',
    'JAX_DEBUG_LOG_MODULES': figures.LOGGED,
    'PYTHONPATH': os.pathsep.join(filter(None, [str(ROOT), os.environ.get('PYTHONPATH')])),
    'PYTHONUNBUFFERED': '1',
    'TMPDIR': folder,
    'XLA_PYTHON_CLIENT_MEM_FRACTION': '0.25' if phase == 'processes' else '0.8',
    'XLA_PYTHON_CLIENT_PREALLOCATE': 'false',
  }


def missing() -> list[str]:
  """The packages of pyproject.toml that this interpreter lacks."""
  named = tomllib.loads((ROOT / 'pyproject.toml').read_text('utf-8'))['project']['dependencies']
  plain = lambda name: name.lower().replace('_', '-')
  names = [requirement.partition('>')[0].partition('[')[0] for requirement in named]
  installed = {
    plain(distribution.metadata['Name']) for distribution in importlib.metadata.distributions()
  }
  return [name for name in names if plain(name) not in installed]


def carry_out(phase: str, arguments: argparse.Namespace, limit_s: float) -> bool:
  """Runs a phase in a process group of its own; whether it ended in order."""
  out, began_s = arguments.out, time.monotonic()
  words = ['--rehearse'] if arguments.rehearse else []
  with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
    with (out / f'{phase}.log').open('wb') as log:
      process = subprocess.Popen(
        [sys.executable, '-m', 'scripts.accelerator', *words]
        + [f'--phase={phase}', f'--out={out}', f'--limit_s={limit_s - 2 * MERCY_S:.0f}'],
        cwd=ROOT,
        env=environment(phase, folder, arguments.rehearse),
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
      )
      try:
        code = process.wait(limit_s)
        ended = 'in order' if code == 0 else f'failed with {code}: see {phase}.log'
      except subprocess.TimeoutExpired:
        ended = f'cut off after {limit_s:.0f} s'
      finally:
        end_all(process)
  text = (out / f'{phase}.log').read_text('utf-8', 'replace')
  seconds = round(time.monotonic() - began_s, 1)
  figures.add(out, phase, ended=ended, seconds=seconds, **figures.compilations(text))
  return ended == 'in order'


def end_all(process: subprocess.Popen) -> None:
  """Ends what is left of a phase: in order, then at once."""
  for sign, wait_s in ((signal.SIGTERM, MERCY_S), (signal.SIGKILL, None)):
    try:
      os.killpg(process.pid, sign)
      process.wait(wait_s)
    except (ProcessLookupError, subprocess.TimeoutExpired):
      pass


def main() -> int:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--rehearse', action='store_true', help='tiny models on the CPU')
  parser.add_argument('--only', default=','.join(LIMITS_S), help='phases, joined by commas')
  parser.add_argument('--out', type=pathlib.Path, help='default $OUT, else runs/accelerator')
  parser.add_argument('--phase', choices=LIMITS_S, help=argparse.SUPPRESS)
  parser.add_argument('--limit_s', type=float, help=argparse.SUPPRESS)
  arguments = parser.parse_args()
  out = arguments.out or pathlib.Path(os.environ.get('OUT') or ROOT / 'runs' / 'accelerator')
  arguments.out = out = out.absolute()
  if arguments.phase:
    module = importlib.import_module(f'scripts.accelerator.{arguments.phase}')
    figures.machine(out)
    module.run(out, arguments.rehearse, time.monotonic() + arguments.limit_s)
    return 0
  chosen = arguments.only.split(',')
  if unknown := sorted({*chosen} - LIMITS_S.keys()):
    parser.error(f'there is no phase {", ".join(unknown)}: choose of {", ".join(LIMITS_S)}')
  if lacking := missing():
    parser.error(
      f'{sys.executable} lacks {", ".join(lacking)}: on a machine with a network run '
      './scripts/accelerator.sh --wheels and copy runs/wheels with the tree'
    )
  out.mkdir(parents=True, exist_ok=True)
  (out / figures.FILE).unlink(missing_ok=True)
  signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
  began_s, ended = time.monotonic(), []
  for phase in chosen:
    left_s = TOTAL_S - (time.monotonic() - began_s)
    if left_s > 4 * MERCY_S:
      ended.append(carry_out(phase, arguments, min(LIMITS_S[phase], left_s)))
    else:
      figures.add(out, phase, ended='not begun: the seven minutes are over')
      ended.append(False)
  print(f'all figures: {out / figures.FILE}')
  return int(not all(ended))


if __name__ == '__main__':
  sys.exit(main())
