"""What the conditions of a run cost in loss, as the studies have measured it with small models: the
figure next to the run's own value, if one between half and twice of it was measured."""

import math
from typing import NamedTuple


class Table(NamedTuple):
  """A table of a page of docs/studies: how a value reads, with what run the losses are compared;
  by value how its row begins, and by how many percent the held-out loss is higher (0: that run)."""

  page: str
  value: str
  against: str
  rows: dict[float, tuple[str, float]]


DEFAULT = 'H=12, tau=3, ahead=1, gamma=0.9', 0.0
LEARNERS = {
  2: ('rda, M=2', 2.51),
  4: ('rda, M=4', 5.91),
  8: ('rda, M=8', 4.6),
  16: ('rda, M=16', 8.62),
}
PERIODS = {6: ('P=H=6', -1.28), 12: DEFAULT, 24: ('P=12, H=24', 0.98), 48: ('P=12, H=48', 4.55)}
WHEN_DUE = {0.986: DEFAULT, 0.807: ('gamma=0.5', 0.67), 0.453: ('gamma=0', 1.52)}
UP = {
  at: (f'up {at:g} steps', loss) for at, loss in {1.5: 0.23, 2: 0.24, 4: -0.51, 8: -0.18}.items()
}
LINK = '{:.2g} periods'  # that the payloads of one take on it
TABLES = {
  'learners': Table('learners.md', 'M = {:g}', 'data-parallel', LEARNERS),
  'period': Table('timing.md', 'H = {:g}', 'H = 12', PERIODS),
  'when due': Table('timing.md', '{:.0%} when due', '99% when due', WHEN_DUE),
  'up': Table('links.md', f'{LINK} up', 'without it', UP),
  'down': Table('links.md', f'{LINK} down', 'without it', {2: ('down 2 steps', 0.77)}),
}


def find(name: str, value: float, of: str = '') -> list[str]:
  """The line about a value of a run, if there is one to say; `of`: what in the run has the value.

  >>> find('period', 20)
  ['H = 20: +0.98 % against H = 12 (timing.md, H = 24)']
  >>> find('learners', 64)
  ['M = 64: not measured']
  """
  table, value = TABLES[name], max(value, 1e-9)
  at = min(table.rows, key=lambda one: abs(math.log(one / value)))
  own, measured = table.value.format(value), table.value.format(at)
  if not 0.5 <= value / at <= 2:
    return [f'{of}{own}: not measured']
  where = table.page if measured == own else f'{table.page}, {measured}'
  line = f'{of}{own}: {table.rows[at][1]:+.2f} % against {table.against} ({where})'
  return [line] if table.rows[at][1] else []
