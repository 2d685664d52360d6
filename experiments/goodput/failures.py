"""The paper's table of goodput while chips fail (arXiv 2604.21428, section 7), beside ours.

    python -m experiments.goodput.failures            # 3 minutes on two cores
    python -m experiments.goodput.failures --quick    # shorter simulated times

*islands*: 48 h of failures alone, months of millions of chips in seconds. *machines*: 30 minutes of
the same failures under the production state machines, over a local and over a wide-area network,
after a warm-up that all checkers watch. Both must agree: no learner ever waits for another.
"""

import argparse
import concurrent.futures
import functools
import math
import multiprocessing
import os

from diloco_jax.verification.sim import hardware
from experiments.goodput import islands, machines

CHIPS = (150_000, 300_000, 600_000, 1_200_000, 2_400_000)
RIGID, ELASTIC = 'DP, rigid', 'DP, elastic'
PAPER = {  # percent, by the number of chips
  RIGID: (72, 57, 38, 27, 18),
  ELASTIC: (88, 80, 69, 58, 40),
  'M=2': (94, 88, 80, 70, 54),
  'M=4': (96, 93, 89, 82, 73),
  'M=8': (98, 96, 94, 88, 80),
  'M=16': (99, 98, 96, 93, 86),
}
EQUAL = 0.01  # points by which machines and islands may differ


def learners_of(row: str) -> int:
  return int(row.removeprefix('M=')) if row.startswith('M=') else 1


def slices_of(row: str, chips: int) -> hardware.Slices:
  return hardware.of_chips(chips / learners_of(row), rigid=row == RIGID)


def goodput(cell: tuple[str, int], hours: float) -> float:
  """Of islands alone, in percent."""
  return 100 * islands.alone(slices_of(*cell), learners_of(cell[0]), hours).goodput


def closed_form(cell: tuple[str, int]) -> float:
  """Of islands alone, in percent."""
  slices = slices_of(*cell)
  return 100 * (islands.rigid_goodput if slices.rigid else islands.elastic_goodput)(slices)


def token_goodput(cell: tuple[str, int], delays: str, warm_up_s: int, measured_s: int) -> float:
  """Of the machines, in percent.

  Raises:
    RuntimeError: they trained for another time than islands alone, so some step waited.
  """
  (row, chips), learners = cell, learners_of(cell[0])
  slices = slices_of(row, chips)
  result = machines.run(
    machines.settings(learners),
    slices=slices,
    delays=delays,
    warm_up_s=warm_up_s,
    measured_s=measured_s,
  )
  alone = islands.alone(slices, learners, measured_s / 3_600, warm_up_s=warm_up_s)
  if abs(result.goodput - alone.goodput) * 100 > EQUAL:
    raise RuntimeError(
      f'{row} with {chips:,} chips: machines trained {result.goodput:.4%} of the time, islands '
      f'alone {alone.goodput:.4%}: a step waited, which is a bug of the protocol or the simulator'
    )
  return 100 * result.token_goodput


def main() -> None:
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--quick', action='store_true', help='shorter simulated times')
  quick = parser.parse_args().quick
  hours, times = (8, (60, 240)) if quick else (48, (machines.WARM_UP_S, machines.MEASURED_S))
  cells = [(row, chips) for row in PAPER for chips in CHIPS]
  decoupled = [cell for cell in cells if learners_of(cell[0]) > 1]
  context = multiprocessing.get_context('spawn')
  with concurrent.futures.ProcessPoolExecutor(os.cpu_count(), context) as pool:
    merged = {
      delays: pool.map(
        functools.partial(token_goodput, delays=delays, warm_up_s=times[0], measured_s=times[1]),
        decoupled,
      )
      for delays in ('lan', 'wan')
    }
    shares = dict(zip(cells, pool.map(functools.partial(goodput, hours=hours), cells)))
    show(f'goodput of islands, {hours} h: paper / ours', shares, published=True)
    for delays, runs in merged.items():
      show(
        f'token goodput of machines, {times[1] / 60:g} minutes, {delays}',
        dict(zip(decoupled, runs)),
      )
  for name, rows in (('elastic and decoupled', False), ('rigid', True)):
    off = [
      share - PAPER[row][CHIPS.index(chips)]
      for (row, chips), share in shares.items()
      if (row == RIGID) == rows
    ]
    rms = math.hypot(*off) / math.sqrt(len(off))
    print(f'{name}: RMS {rms:.2f} points from the paper, worst {max(map(abs, off)):.2f}')
  worst = max(abs(share - closed_form(cell)) for cell, share in shares.items())
  print(f'islands and closed form differ by at most {worst:.2f} points')


def show(title: str, shares: dict[tuple[str, int], float], published: bool = False) -> None:
  """Prints a table of percent."""
  print(f'\n{title}')
  print(' ' * 12 + ''.join(f'{chips:>15,}' for chips in CHIPS))
  for row in dict.fromkeys(row for row, _ in shares):
    cells = (f'{shares[row, chips]:.2f}' for chips in CHIPS)
    if published:
      cells = (f'{paper} / {ours}' for paper, ours in zip(PAPER[row], cells))
    print(f'{row:12}' + ''.join(f'{cell:>15}' for cell in cells))


if __name__ == '__main__':
  main()
