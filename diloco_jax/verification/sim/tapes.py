"""Tapes of a simulated run: one hash over all tapes, and files that replay like those of real
runs."""

import hashlib
import pathlib

from diloco_jax.protocol import events
from diloco_jax.protocol.tape import observers
from diloco_jax.protocol.tape import tape as tape_lib


class Tapes(observers.Observer):
  """An observer that writes the tape of every process.

  Args:
    folder: of the files NODE.LIFE.0.jsonl, named as in storage/tapes.py; None: only hash the turns.
    commit: of the code, for the headers.
  """

  def __init__(self, folder: pathlib.Path | None = None, commit: str = 'unknown'):
    self._folder, self._commit = folder, commit
    self._writers: dict[int, tape_lib.Writer] = {}
    self._files: dict[int, pathlib.Path] = {}
    self._started: dict[str, int] = {}
    if folder is not None:
      folder.mkdir(parents=True, exist_ok=True)

  @property
  def hash(self) -> str:
    """Over every turn of every machine of the run."""
    ends = ' '.join(writer.hash for _, writer in sorted(self._writers.items()))
    return hashlib.sha256(ends.encode()).hexdigest()[:16]

  def born(self, now_ns: int, process: observers.ObservedProcess) -> None:
    writer = self._writers[process.number] = tape_lib.Writer(process.start, commit=self._commit)
    node = process.start.node.replace('*', '-second')
    self._started[node] = self._started.get(node, 0) + 1
    if self._folder is not None:
      self._files[process.number] = self._folder / f'{node}.{self._started[node]}.0.jsonl'
    self._write(process, writer.header())

  def saw(
    self,
    process: observers.ObservedProcess,
    now_ns: int,
    event: events.Event,
    out: observers.Actions,
  ) -> None:
    self._write(process, self._writers[process.number].turn(now_ns, event, out))

  def crashed(
    self, process: observers.ObservedProcess, now_ns: int, event: events.Event, error: Exception
  ) -> None:
    self._write(process, self._writers[process.number].crash(now_ns, event, error))

  def _write(self, process: observers.ObservedProcess, line: bytes) -> None:
    if self._folder is not None:
      with self._files[process.number].open('ab') as file:
        file.write(line)
