"""Draws graphs and conversations as SVG, with nothing but text: the same input, the same file."""

import html
import statistics
from collections.abc import Iterable, Sequence

_ROW, _BOX, _GAP = 78, 28, 18  # heights and the space between two boxes, in pixels
_HEAD = (
  '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {w} {h}" width="{w}" height="{h}" '
  'role="img" font-family="sans-serif" font-size="13" text-anchor="middle">\n<title>{title}</title>'
  '\n<defs><marker id="head" viewBox="0 0 9 8" refX="9" refY="4" markerWidth="9" markerHeight="8" '
  'orient="auto-start-reverse"><path d="M0 0L9 4L0 8z" fill="#444"/></marker></defs>\n'
  '<rect width="{w}" height="{h}" fill="#fff"/>\n'
)


def svg(title: str, width: float, height: float, shapes: Iterable[str]) -> str:
  head = _HEAD.format(w=round(width), h=round(height), title=html.escape(title))
  return head + '\n'.join(shapes) + '\n</svg>\n'


def text(x: float, y: float, words: str, more: str = '') -> str:
  return f'<text x="{x:.0f}" y="{y:.0f}"{more}>{html.escape(words)}</text>'


def box(x: float, y: float, words: str, width: float, fill: str = '#eef3f8') -> str:
  """Around a middle."""
  left, top = x - width / 2, y - _BOX / 2
  frame = f'<rect x="{left:.0f}" y="{top:.0f}" width="{width:.0f}" height="{_BOX}" rx="5" '
  return f'{frame}fill="{fill}" stroke="#5b7fa3"/>{text(x, y + 5, words)}'


def arrow(path: str, more: str = ' marker-end="url(#head)"') -> str:
  return f'<path d="{path}" fill="none" stroke="#444"{more}/>'


def _wide(name: str) -> float:
  return 8 * len(name) + 20 if name else 12  # '': an arrow that passes a row


class _Layers:
  """Boxes in rows, so that arrows lead down, but for those that close a circle."""

  def __init__(self, arrows: Sequence[tuple[str, str]]):
    self.names = list(dict.fromkeys(name for pair in arrows for name in pair))
    self.rank: dict = {}
    self.back = self._circles(arrows)
    down = [(b, a) if (a, b) in self.back else (a, b) for a, b in arrows]
    self.rank = dict.fromkeys(self.names, 0)
    for _ in self.names:
      for a, b in down:
        self.rank[b] = max(self.rank[b], self.rank[a] + 1)
    self.chains = {pair: self._chain(*pair) for pair in dict.fromkeys(down)}
    links = [pair for chain in self.chains.values() for pair in zip(chain, chain[1:])]
    self.beside = {
      place: ([a for a, b in links if b == place], [b for a, b in links if a == place])
      for place in self.rank
    }
    self.rows = [
      [place for place in self.rank if self.rank[place] == row]
      for row in range(max(self.rank.values()) + 1)
    ]
    self._order()
    self._place()

  def _circles(self, arrows: Sequence[tuple[str, str]]) -> set[tuple[str, str]]:
    circles, seen, path = set(), set(), []

    def visit(name: str) -> None:
      seen.add(name)
      path.append(name)
      for a, b in arrows:
        if a == name and b in path:
          circles.add((a, b))
        elif a == name and b not in seen:
          visit(b)
      path.pop()

    for name in self.names:
      if name not in seen:
        visit(name)
    return circles

  def _chain(self, a: str, b: str) -> list:
    """The arrow from a to b, with a place in each row between."""
    middle = [(a, b, row) for row in range(self.rank[a] + 1, self.rank[b])]
    self.rank |= {place: place[2] for place in middle}
    return [a, *middle, b]

  def _order(self) -> None:
    for turn in range(16):
      for row in self.rows if turn % 2 == 0 else self.rows[::-1]:
        place = {name: i for some in self.rows for i, name in enumerate(some)}
        near = {name: [place[other] for other in self.beside[name][turn % 2]] for name in row}
        row.sort(key=lambda name: statistics.fmean(near[name]) if near[name] else place[name])

  def _place(self) -> None:
    self.x = {name: 100.0 * i for row in self.rows for i, name in enumerate(row)}
    for turn in range(80):
      for row in self.rows if turn % 2 == 0 else self.rows[::-1]:
        for name in row:
          if near := self.beside[name][turn % 2] or [*self.beside[name][0], *self.beside[name][1]]:
            self.x[name] = statistics.fmean(self.x[other] for other in near)
        middle = statistics.fmean(self.x[name] for name in row)
        for a, b in zip(row, row[1:]):
          self.x[b] = max(self.x[b], self.x[a] + self._apart(a, b))
        moved = middle - statistics.fmean(self.x[name] for name in row)
        for name in row:
          self.x[name] += moved
    left = min(self.x[name] - self._width(name) / 2 for name in self.x) - 12
    self.x = {name: x - left for name, x in self.x.items()}

  def _width(self, name) -> float:
    return _wide(name if isinstance(name, str) else '')

  def _apart(self, a, b) -> float:
    return (self._width(a) + self._width(b)) / 2 + _GAP

  @property
  def size(self) -> tuple[float, float]:
    width = max(self.x[name] + self._width(name) / 2 for name in self.x) + 12
    return width, _ROW * (len(self.rows) - 1) + _BOX + 24

  def y(self, name) -> float:
    return 12 + _BOX / 2 + _ROW * self.rank[name]


def graph(title: str, arrows: Sequence[tuple[str, str]], numbered: bool = False) -> str:
  """Boxes and arrows; with `numbered` each arrow has its place in `arrows`, from 1 on."""
  layers, shapes, labels = _Layers(arrows), [], []
  for number, (a, b) in enumerate(arrows, 1):
    back = (a, b) in layers.back
    chain = layers.chains[(b, a) if back else (a, b)]
    both = (b, a) in arrows
    shift = (14 if back else -14) if both else 0
    points = [(layers.x[name] + shift, layers.y(name)) for name in chain]
    x, y = points[0][0], points[0][1] + _BOX / 2
    path = f'M{x:.0f} {y:.0f}'
    middle = None
    for place, (to_x, to_y) in enumerate(points[1:], 2):
      to_y -= _BOX / 2 if place == len(points) else 0
      bend = (to_y - y) / 2
      path += f'C{x:.0f} {y + bend:.0f} {to_x:.0f} {to_y - bend:.0f} {to_x:.0f} {to_y:.0f}'
      if middle is None or back:
        middle = (x + to_x) / 2, (y + to_y) / 2
      x, y = to_x, to_y
    shapes.append(arrow(path, f' marker-{"start" if back else "end"}="url(#head)"'))
    if numbered:
      place = f'cx="{middle[0]:.0f}" cy="{middle[1]:.0f}"'
      labels.append(f'<circle {place} r="9" fill="#fff" stroke="#888"/>')
      labels.append(text(middle[0], middle[1] + 4, str(number), ' font-size="11"'))
  boxes = [box(layers.x[name], layers.y(name), name, _wide(name)) for name in layers.names]
  return svg(title, *layers.size, [*shapes, *labels, *boxes])


def conversation(title: str, left: str, right: str, rows: Sequence[tuple[str, str]]) -> str:
  """Rows of ('>' or '<', message), or ('', what begins here)."""
  near, far, y, shapes = 110, 640, 26, []
  for way, words in rows:
    y += 32
    if way:
      begin, end = (near, far) if way == '>' else (far, near)
      shapes += [arrow(f'M{begin} {y}H{end}'), text((near + far) / 2, y - 6, words)]
    else:
      y += 6
      shapes.append(f'<rect x="20" y="{y - 16}" width="{far + 70}" height="24" fill="#f3efe2"/>')
      shapes.append(text((near + far) / 2, y + 1, words, ' font-style="italic"'))
  lines = [arrow(f'M{x} 40V{y + 16}', ' stroke-dasharray="3 4"') for x in (near, far)]
  heads = [box(near, 26, left, 150), box(far, 26, right, 150)]
  return svg(title, far + 110, y + 28, [*lines, *shapes, *heads])
