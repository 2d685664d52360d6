"""The program of a learner (`diloco learner`) on faulty hardware.

--spoil=nan:N or huge:N spoils its pseudo-gradients from the N-th on, behind its encoder (an integer
codec): scales that mean NaN, or values far too large.

--kills=DIR kills it during a donation. The run chooses the donor, so each kill is a file in that
folder, named as its place (or NAME.1, ... for more than one): the first process that reaches the
place removes a file and kills itself.

| name | where |
|---|---|
| donation.sent_10, _50, _90 | the donor has sent 10, 50, 90 % of its moments |
| donation.got_10, _50, _90 | the joiner has received 10, 50, 90 % of them |
"""

import dataclasses
import os
import pathlib
import signal
from collections.abc import Iterator

import jax
import numpy as np
from absl import flags

from diloco_jax.launch import cli as cli_lib
from diloco_jax.launch import nodes
from diloco_jax.launch import supervisor as supervisor_lib
from diloco_jax.learner import work as learner_work
from diloco_jax.transport import chunks, grpc_client, grpc_session

PERCENTS = (10, 50, 90)
_PROGRAM = ['diloco_jax', 'learner']
_SCALES = {'nan': 255, 'huge': 150}  # exponent bytes of a block (numerics/codecs.py)
_SPOILED_BLOCKS = 8


def instead(program: supervisor_lib.Program, *faults: str) -> supervisor_lib.Program:
  """Replaces a learner's program by this one; `faults`: flags of it."""
  python, option, *words = program.command
  if words[: len(_PROGRAM)] != _PROGRAM:
    return program
  command = [python, option, __spec__.name, *words[len(_PROGRAM) :], *faults]
  return dataclasses.replace(program, command=command)


class Spoiler:
  """Spoils a learner's payloads from the N-th on.

  >>> spoiler = Spoiler('nan:2')
  >>> [list(spoiler(bytes(3))) for _ in range(2)]
  [[0, 0, 0], [255, 255, 255]]
  """

  def __init__(self, text: str):
    how, _, first = text.partition(':')
    if how not in _SCALES or not first.isdigit():
      raise ValueError(f'--spoil={text}: it must be nan:N or huge:N, like nan:3')
    self._scale, self._left = _SCALES[how], int(first)

  def __call__(self, data: bytes) -> bytes:
    self._left -= 1
    if self._left > 0:
      return data
    count = min(_SPOILED_BLOCKS, len(data))
    return bytes([self._scale]) * count + data[count:]


class _SpoilingWork(learner_work.LearnerWork):
  """Spoils the output of the encoder."""

  spoiler: Spoiler

  def _encoded(self, sync: int, fragment: int, data: jax.Array, ok: jax.Array) -> None:
    spoiled = np.frombuffer(self.spoiler(np.asarray(data).tobytes()), np.uint8)
    super()._encoded(sync, fragment, spoiled, ok)


class _MortalSession(grpc_session.Session):
  """Kills its process at a chunk of a donation."""

  kills: pathlib.Path

  def bulk_frames(self) -> Iterator[bytes]:
    for frame in super().bulk_frames():
      yield frame
      self._kill_at_percent('donation.sent', frame)

  def _on_frame(self, frame: bytes) -> None:
    self._kill_at_percent('donation.got', frame)
    super()._on_frame(frame)

  def _kill_at_percent(self, name: str, frame: bytes) -> None:
    if chunks.acknowledged(frame) is not None:
      return
    chunk = chunks.parse(frame)
    for percent in PERCENTS if chunk.count >= 10 else ():  # no fragment of these runs has as many
      if 100 * (chunk.index + 1) >= percent * chunk.count:
        self._kill_if_armed(f'{name}_{percent}')

  def _kill_if_armed(self, name: str) -> None:
    for path in sorted(self.kills.glob(f'{name}*')):
      try:
        path.unlink()
      except FileNotFoundError:  # another process took it first
        continue
      os.kill(os.getpid(), signal.SIGKILL)


class _MortalTransport(grpc_client.GrpcLearnerTransport):
  session_class = _MortalSession


def main(argv: list[str]) -> int:
  del argv
  config, values = cli_lib.config(), flags.FLAGS
  work_class, transport_class = learner_work.LearnerWork, grpc_client.GrpcLearnerTransport
  if values.spoil:
    _SpoilingWork.spoiler, work_class = Spoiler(values.spoil), _SpoilingWork
  if values.kills:
    _MortalSession.kills, transport_class = pathlib.Path(values.kills), _MortalTransport
  where = values.workdir, values.learner_id, values.syncer
  return nodes.learner(config, *where, cli_lib.access(), work_class, transport_class)


if __name__ == '__main__':
  cli_lib.define_config()
  cli_lib.define_access()
  for name in ('workdir', 'learner_id', 'syncer'):
    flags.DEFINE_string(name, None, 'as that of `diloco learner`', required=True)
  flags.DEFINE_string('spoil', '', 'nan:N or huge:N')
  flags.DEFINE_string('kills', '', 'a folder of kills')
  cli_lib.run_main(main)
