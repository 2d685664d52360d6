"""Sizes, times and lines for people."""

import collections
import contextlib
import re
import sys
import textwrap
import time
from collections.abc import Callable, Mapping


def labels(labels_of: Mapping[str, str]) -> str:
  """What a label function has made of the arrays of a model, and which are not of the body.

  >>> labels({'w': 'body', 'b': 'body', **{f'head/{n}': 'local' for n in 'abcd'}})
  'labels of the arrays: 2 body, 4 local (head/a, head/b, head/c, ...)'
  """
  texts = []
  for label, count in collections.Counter(labels_of.values()).items():
    names = [name for name, own in labels_of.items() if own == label][:3] + ['...'] * (count > 3)
    texts.append(f'{count} {label}' + f' ({", ".join(names)})' * (label != 'body'))
  return f'labels of the arrays: {", ".join(texts)}'


def clock() -> str:
  """The time of day, before a line for people."""
  return time.strftime('%H:%M:%S ')


def wrap(line: str, width: int, indent: int = 0) -> list[str]:
  """Lines of at most `width` columns; those after the first are indented like the text behind a
  label, by `indent` at least.

  >>> wrap('model        a folder of arrays, of the types of the task', 42)
  ['model        a folder of arrays, of the', '             types of the task']
  """
  label = re.match(r'\s*(\S+( \S+)*\s{2,})?', line)
  wrapped = textwrap.wrap(
    line,
    width,
    subsequent_indent=' ' * max(indent, min(label.end() if label else 0, width // 3)),
    break_long_words=False,
    break_on_hyphens=False,
  )
  return wrapped or ['']


def shell(command: str, width: int) -> str:
  """A command in lines of at most `width` columns that a shell takes for one."""
  how = {'break_long_words': False, 'break_on_hyphens': False}
  quoted = "'" in command or len(command) <= width
  lines = [command] if quoted else textwrap.wrap(command, width - 2, subsequent_indent='  ', **how)
  return ' \\\n'.join(lines)


def say(line: str) -> None:
  """Prints a line, in one write, so that the threads of a process do not mix their lines; what
  standard output cannot show is replaced."""
  encoding = getattr(sys.stdout, 'encoding', None) or 'utf-8'
  print(line.encode(encoding, 'replace').decode(encoding) + '\n', end='', flush=True)


def try_to_show(show: Callable[[], object], view: str, later: str) -> bool:
  """Makes a view of a run. Its fault is one line, and none of the run; returns whether all is well.
  `later`: the command that makes the view then."""
  try:
    show()
    return True
  except Exception as error:
    why = ' '.join(f'{type(error).__name__}: {error}'.split())
    with contextlib.suppress(OSError, ValueError):  # standard error is closed, too
      print(f'error: {view} is missing ({why}); the run is safe. Later: {later}', file=sys.stderr)
    return False


def until_it_fails(show: Callable[..., object], view: str, later: str) -> Callable[..., None]:
  """Shows the same again and again; after a fault, which is said once, no more."""
  well = True

  def again(*what: object) -> None:
    nonlocal well
    well = well and try_to_show(lambda: show(*what), view, later)

  return again


def size(count_bytes: float) -> str:
  """Bytes for people.

  >>> size(512), size(2_500_000)
  ('512 B', '2.5 MB')
  """
  for unit in ('B', 'kB', 'MB', 'GB'):
    if count_bytes < 1000:
      return f'{count_bytes:.0f} B' if unit == 'B' else f'{count_bytes:.1f} {unit}'
    count_bytes /= 1000
  return f'{count_bytes:.1f} TB'


def duration(seconds: float) -> str:
  """A time for people.

  >>> duration(44.4), duration(200), duration(359.7), duration(7_500), duration(200_000)
  ('44 s', '3 min 20 s', '6 min 0 s', '2 h 5 min', '2 d 7 h')
  """
  seconds = round(seconds)
  for large, small, big, little in ((86400, 3600, 'd', 'h'), (3600, 60, 'h', 'min')):
    if seconds >= large:
      return f'{seconds // large} {big} {seconds % large // small} {little}'
  minutes = f'{seconds // 60} min ' if seconds >= 60 else ''
  return f'{minutes}{seconds % 60} s'
