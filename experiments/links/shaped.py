"""A syncer and learners in network namespaces, each learner's link shaped both ways by the kernel.

`tc ... tbf`, a token bucket, at both ends of a learner's cable. Delay is not added: the queue of a
shaped link holds what it sends in QUEUE_S, so a busy link has that delay.
"""

import contextlib
import pathlib
import subprocess
import sys
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from scripts import networks

SYNCER = 'syncer'
ADDRESS = '10.77.0.{}'
PORT = 7070
OFF = 0.10  # a link that is measured further from its rate than this is not measured with
CHECK_S = 1.2  # how long a measured transfer takes, about
QUEUE_S = 0.2
BURST_S, LEAST_BURST = 0.002, 4 << 10  # at least a packet with its headers, and a little more
LEAST_QUEUE = 32 << 10
FREE_BYTES = 256 << 20  # of the transfer over a link that is not shaped
TRANSFER = pathlib.Path(__file__).with_name('transfer.py')


class WrongRate(RuntimeError):
  """A link does not have the rate that it was shaped to."""


class Counters(NamedTuple):
  """Bytes on a learner's link since it exists."""

  up: int
  down: int


class Links:
  """The namespaces of a run. Made by `open_links`; not shaped at first."""

  def __init__(self, enter: dict[str, Sequence[str]]):
    self._enter = enter
    self._shaped = False
    self.learners = [name for name in enter if name != SYNCER]

  def address(self, node: str) -> str:
    return ADDRESS.format(1 + list(self._enter).index(node))

  def start(self, node: str, words: Sequence[str], **more: Any) -> subprocess.Popen:
    """Starts a process in the namespace of a node."""
    return subprocess.Popen([*self._enter[node], *words], **more)

  def shape(self, mbit: float) -> None:
    """Shapes every learner's link, both ways; 0: no limit. The bytes in its queue are lost, and TCP
    sends them again."""
    words = bucket(mbit)
    for node in self.learners:
      ends = ((self._enter[node], 'cable'), ((), node))
      for enter, device in ends:
        if self._shaped:
          networks.run(*enter, 'tc', 'qdisc', 'del', 'dev', device, 'root')
        if mbit:
          networks.run(*enter, 'tc', 'qdisc', 'add', 'dev', device, 'root', *words)
    self._shaped = bool(mbit)

  def check(self, mbit: float) -> dict[str, float]:
    """Mbit/s of transfers up and then down, all learners at once: the least and the greatest.

    Raises:
      WrongRate: one is off by more than OFF of `mbit`.
    """
    count = round(mbit * 1e6 / 8 * CHECK_S) or FREE_BYTES // len(self.learners)
    skip = _burst(mbit) if mbit else count // 8
    found = {}
    for way in ('up', 'down'):
      rates = self._transfers(way, skip, skip + count)
      found |= {f'{way}_least': min(rates), f'{way}_most': max(rates)}
    off = [f'{rate:.3g}' for rate in found.values() if mbit and abs(rate / mbit - 1) > OFF]
    if off:
      raise WrongRate(
        f'links of {mbit:g} Mbit/s were measured with {", ".join(off)} Mbit/s: the kernel shapes '
        'them wrongly, or the machine is too busy'
      )
    return found

  def counters(self) -> dict[str, Counters]:
    """Of each learner."""
    found = {}
    for node in self.learners:
      words = [*self._enter[node], 'cat', '/proc/net/dev']
      text = subprocess.run(words, capture_output=True, encoding='utf-8', check=True).stdout
      (row,) = (line.split() for line in text.splitlines() if line.lstrip().startswith('cable'))
      found[node] = Counters(up=int(row[9]), down=int(row[1]))
    return found

  def _transfers(self, way: str, skip: int, count: int) -> list[float]:
    """Mbit/s of each learner."""
    program = [sys.executable, '-S', str(TRANSFER)]
    receivers, senders = [], []
    try:
      for node in self.learners:
        source, sink = (node, SYNCER) if way == 'up' else (SYNCER, node)
        receiver = self.start(
          sink, [*program, 'receive', str(skip)], stdout=subprocess.PIPE, text=True
        )
        receivers.append(receiver)
        port = receiver.stdout.readline().strip()
        words = [*program, 'send', self.address(sink), port, str(count)]
        senders.append(self.start(source, words))
      return [float(one.communicate()[0]) * 8 / 1e6 for one in receivers]
    finally:
      for one in (*receivers, *senders):
        one.kill()
        one.wait()


@contextlib.contextmanager
def open_links(learners: int) -> Iterator[Links]:
  """The namespaces of a syncer and of l0, l1, ..., connected by a bridge. The process must be in a
  network of its own (scripts/networks.py)."""
  nodes = [SYNCER, *(f'l{index}' for index in range(learners))]
  networks.bridge()
  with contextlib.ExitStack() as stack:
    enter = {
      node: stack.enter_context(networks.network(node, ADDRESS.format(1 + place)))
      for place, node in enumerate(nodes)
    }
    yield Links(enter)


def bucket(mbit: float) -> list[str]:
  """The words of tc for a link of 10^6 bits per second.

  >>> ' '.join(bucket(50))
  'tbf rate 50000kbit burst 12500 limit 1262500'
  """
  burst = _burst(mbit)
  limit = burst + max(LEAST_QUEUE, round(mbit * 1e6 / 8 * QUEUE_S))
  rate = f'{mbit * 1000:.0f}kbit'
  return ['tbf', 'rate', rate, 'burst', str(burst), 'limit', str(limit)]


def _burst(mbit: float) -> int:
  return max(LEAST_BURST, round(mbit * 1e6 / 8 * BURST_S))
