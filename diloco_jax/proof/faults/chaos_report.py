"""What a chaos run looked like to those who were not hit: a fold of its records, and words.

The records (report/records.py) are what the processes themselves wrote down while it happened. So
the same facts serve the conductor of a plan, which waits for them, and the summary at the end.
"""

import bisect
import collections
import dataclasses
import statistics
from typing import Any

SECOND_NS = 1_000_000_000


@dataclasses.dataclass(slots=True, kw_only=True)
class Episode:
  """One fault as it was carried out, times on the monotonic clock. `found`: it found its victim."""

  kind: str
  node: str
  amount: int = 0
  began_ns: int = 0
  ended_ns: int = 0
  found: bool = True
  recovered_ns: int | None = None  # its victim took part in a merge again


class Facts:
  """The run so far, by learner id. Times in ns of the monotonic clock, in the order of time."""

  def __init__(self, learners: list[str]):
    self.steps: dict[str, list[int]] = {name: [] for name in learners}
    self.merges: list[int] = []  # when each outer step was published
    self.merged: dict[str, list[int]] = collections.defaultdict(list)  # and with whom
    self.joined: dict[str, list[tuple[int, int]]] = collections.defaultdict(list)  # incarnation
    self.lost: dict[str, list[tuple[int, str]]] = collections.defaultdict(list)  # why
    self.exits: dict[str, list[tuple[int, int]]] = collections.defaultdict(list)  # code
    self.ledger: dict[str, Any] = {}

  def take(self, process: str, fact: dict[str, Any]) -> None:
    """One more record of a process."""
    t_ns = fact.get('t_ns', 0)
    match fact:
      case {'name': 'step'} if process in self.steps:
        self.steps[process].append(t_ns)
      case {'name': 'synced', 'participants': participants}:
        self.merges.append(t_ns)
        for name in participants:
          self.merged[name].append(t_ns)
      case {'name': 'member', 'state': 'joined', 'learner': name, 'incarnation': incarnation}:
        self.joined[name].append((t_ns, incarnation))
      case {'name': 'member', 'state': 'lost', 'learner': name, 'reason': reason}:
        self.lost[name].append((t_ns, reason))
      case {'name': 'exit', 'child': child, 'code': code}:
        self.exits[child].append((t_ns, code))
      case {'name': 'ledger'}:
        self.ledger = fact

  @property
  def began_ns(self) -> int | None:
    """When the last of the learners had joined for the first time; None: not all have."""
    if any(name not in self.joined for name in self.steps):
      return None
    return max(self.joined[name][0][0] for name in self.steps)


def within(times_ns: list[int], began_ns: int, ended_ns: int) -> int:
  """How many of these ordered times are in a span.

  >>> within([1, 5, 7, 9], 5, 9)
  3
  """
  return bisect.bisect_right(times_ns, ended_ns) - bisect.bisect_left(times_ns, began_ns)


def untouched(facts: Facts, episodes: list[Episode]) -> list[str]:
  return [name for name in facts.steps if all(episode.node != name for episode in episodes)]


@dataclasses.dataclass(frozen=True, slots=True)
class Pace:
  """How a learner stepped in a span: steps, and times between the ends of two of them in s."""

  steps: int
  median_s: float
  longest_s: float


def pace(times_ns: list[int], began_ns: int, ended_ns: int) -> Pace:
  """The pace in a span, whose borders count as steps: nothing is as long as standing still."""
  inside = [t for t in times_ns if began_ns <= t <= ended_ns]
  gaps = [(b - a) / SECOND_NS for a, b in zip([began_ns, *inside], [*inside, ended_ns])]
  return Pace(len(inside), statistics.median(gaps), max(gaps))


def balance(ledger: dict[str, Any]) -> int:
  """Fragment-tokens that nobody accounts for; 0 if the books are in order."""
  settled = ledger['merged'] + sum(ledger['discarded'].values()) + ledger['unsettled']
  return ledger['fragments'] * ledger['trained'] - settled


def text(facts: Facts, episodes: list[Episode], healed_ns: int) -> str:
  """The run for a stranger: what was done to whom, and what the others made of it."""
  began_ns = facts.began_ns or 0
  lines = ['', 'What was done, in seconds since all learners had joined, and what happened then:']
  others = untouched(facts, episodes)
  for episode in sorted(episodes, key=lambda episode: episode.began_ns):
    lines.append('  ' + _episode(facts, episode, began_ns, others))
  lines.append('Learners that nothing was done to, from the first fault to the end of the last:')
  first_ns = min((episode.began_ns for episode in episodes), default=began_ns)
  for name in others:
    found = pace(facts.steps[name], first_ns, healed_ns)
    lines.append(
      f'  {name}: {found.steps} steps, median {found.median_s * 1e3:.0f} ms apart, '
      f'longest gap {found.longest_s * 1e3:.0f} ms'
    )
  return '\n'.join([*lines, *_books(facts.ledger)])


def _episode(facts: Facts, episode: Episode, began_ns: int, others: list[str]) -> str:
  def at(t_ns: int) -> str:
    return f'{(t_ns - began_ns) / SECOND_NS:6.1f}'

  what = f'{episode.kind} {episode.node}'
  if not episode.found:
    return f'{at(episode.began_ns)}         {what:18} found no process'
  span = (episode.began_ns, episode.ended_ns)
  steps = ', '.join(f'{name} {within(facts.steps[name], *span)}' for name in others)
  back = (
    'never took part again'
    if episode.recovered_ns is None
    else (f'took part again at {at(episode.recovered_ns).strip()}')
  )
  return (
    f'{at(span[0])} -{at(span[1])} {what:18} {within(facts.merges, *span)} merges; '
    f'steps: {steps}; {episode.node} {back}'
  )


def _books(ledger: dict[str, Any]) -> list[str]:
  if not ledger:
    return ['There is no ledger: the syncer has not told its books.']
  discarded = ', '.join(f'{reason} {count}' for reason, count in ledger['discarded'].items())
  lines = [
    f'Tokens: {ledger["trained"]} trained, each in {ledger["fragments"]} fragments = '
    f'{ledger["merged"]} merged + {sum(ledger["discarded"].values())} discarded ({discarded}) + '
    f'{ledger["unsettled"]} not yet settled',
  ]
  if missing := balance(ledger):
    lines.append(f'THE BOOKS DO NOT ADD UP: {missing} fragment-tokens are unaccounted for')
  return lines


def complaints(facts: Facts, episodes: list[Episode]) -> list[str]:
  """What was promised and did not happen, in words: the others go on, victims come back, no token
  is unaccounted for."""
  found = []
  for episode in episodes:
    if not episode.found:
      continue
    what, span = f'{episode.kind} of {episode.node}', (episode.began_ns, episode.ended_ns)
    if not within(facts.merges, *span):
      found.append(f'nothing was merged during the {what}')
    found += [
      f'{name} took no step during the {what}'
      for name in untouched(facts, episodes)
      if not within(facts.steps[name], *span)
    ]
    if episode.recovered_ns is None:
      found.append(f'after the {what} it never took part again')
  if not facts.ledger or balance(facts.ledger) or facts.ledger['unsettled']:
    found.append('the books do not add up, or are not closed')
  return found
