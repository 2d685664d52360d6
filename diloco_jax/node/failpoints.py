"""Named places where a test has a process killed: DILOCO_FAILPOINT=NAME:kill.

A process that reaches the place kills itself with SIGKILL, as a power button would: nothing is
flushed, nobody is told. Without the variable, passing a place costs one comparison.

DILOCO_SPOIL=nan:N or huge:N has a learner with an integer codec spoil what it sends from its N-th
pseudo-gradient on, behind its encoder, as faulty hardware would: scales that mean NaN, or values
far too large.

| name | where in the syncer |
|---|---|
| wal.before_append | the outer step has been carried out, nothing of it is written |
| wal.after_append | the operating system has the record, the disk may not |
| wal.after_commit | the record is durable, nobody knows of it |
| save.before | a checkpoint is due, nothing of it is written |
| save.after | it is written, the log still holds all that it makes superfluous |
| compact.after | that part of the log is dropped, the machine does not know of the checkpoint |

A donation on its way is no place but a share, and who gives it is the run's choice. So these are
armed by a file in the folder DILOCO_FAILPOINT_DIR, named as the place (or NAME.1, ... for more than
one): the first process that comes by takes a file away and kills itself.

| name | where in a learner |
|---|---|
| donation.sent_10, _50, _90 | the donor has handed so many percent of its moments to the network |
| donation.got_10, _50, _90 | the joiner has received so many percent of them |
"""

import os
import pathlib
import signal

VARIABLE = 'DILOCO_FAILPOINT'
NAMES = (
  'wal.before_append',
  'wal.after_append',
  'wal.after_commit',
  'save.before',
  'save.after',
  'compact.after',
)


def wanted(text: str) -> str:
  """The place that the variable names; '' for none. Raises ValueError.

  >>> wanted('save.after:kill')
  'save.after'
  """
  name, _, what = text.partition(':')
  if text and (name not in NAMES or what != 'kill'):
    raise ValueError(f'{VARIABLE}={text}: it must be NAME:kill, NAME one of {", ".join(NAMES)}')
  return name


SPOIL = 'DILOCO_SPOIL'
_SCALES = {'nan': 255, 'huge': 150}  # exponent bytes of a block (numerics/codecs.py)
_SPOILED_BLOCKS = 8


class Spoiler:
  """What becomes of a learner's payloads; `text`: the variable's, '' for nothing.

  >>> spoiler = Spoiler('nan:2')
  >>> [list(spoiler(bytes(3))) for _ in range(2)]
  [[0, 0, 0], [255, 255, 255]]
  """

  def __init__(self, text: str):
    how, _, first = text.partition(':')
    if text and (how not in _SCALES or not first.isdigit()):
      raise ValueError(f'{SPOIL}={text}: it must be nan:N or huge:N, like nan:3')
    self._scale, self._left = _SCALES.get(how), int(first or 0)

  def __call__(self, data: memoryview | bytes) -> memoryview | bytes:
    if self._scale is None:
      return data
    self._left -= 1
    if self._left > 0:
      return data
    count = min(_SPOILED_BLOCKS, len(data))
    return memoryview(bytes([self._scale]) * count + bytes(data[count:]))


def spoiler() -> Spoiler:
  """As this process's environment wants it. Raises ValueError."""
  return Spoiler(os.environ.get(SPOIL, ''))


FOLDER = 'DILOCO_FAILPOINT_DIR'
PERCENTS = (10, 50, 90)
_WANTED = wanted(os.environ.get(VARIABLE, ''))


def reached(name: str) -> None:
  """This place was reached."""
  if name == _WANTED:
    os.kill(os.getpid(), signal.SIGKILL)


_FOLDER = os.environ.get(FOLDER, '')
ARMED = bool(_FOLDER)


def donated(name: str, share: float) -> None:
  """This share of a donation has passed; `name` is 'donation.sent' or 'donation.got'."""
  for percent in PERCENTS:
    if 100 * share >= percent:
      _take(f'{name}_{percent}')


def _take(name: str) -> None:
  for path in sorted(pathlib.Path(_FOLDER).glob(f'{name}*')):
    try:
      path.unlink()
    except FileNotFoundError:  # somebody else was here first
      continue
    os.kill(os.getpid(), signal.SIGKILL)
