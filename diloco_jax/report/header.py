"""Sizes and times for people."""

import time


def clock() -> str:
  """The time of day, before a line for people."""
  return time.strftime('%H:%M:%S ')


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
