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
    self._lives: dict[str, int] = {}
    if folder is not None:
      folder.mkdir(parents=True, exist_ok=True)

  @property
  def hash(self) -> str:
    """Over every turn of every machine of the run."""
    ends = ' '.join(writer.hash for _, writer in sorted(self._writers.items()))
    return hashlib.sha256(ends.encode()).hexdigest()[:16]

  def born(self, now_ns: int, life: observers.ObservedProcess) -> None:
    writer = self._writers[life.number] = tape_lib.Writer(life.start, commit=self._commit)
    node = life.start.node.replace('*', '-second')
    self._lives[node] = self._lives.get(node, 0) + 1
    if self._folder is not None:
      self._files[life.number] = self._folder / f'{node}.{self._lives[node]}.0.jsonl'
    self._write(life, writer.header())

  def saw(
    self, life: observers.ObservedProcess, now_ns: int, event: events.Event, out: observers.Actions
  ) -> None:
    self._write(life, self._writers[life.number].turn(now_ns, event, out))

  def crashed(
    self, life: observers.ObservedProcess, now_ns: int, event: events.Event, error: Exception
  ) -> None:
    self._write(life, self._writers[life.number].crash(now_ns, event, error))

  def _write(self, life: observers.ObservedProcess, line: bytes) -> None:
    if self._folder is not None:
      with self._files[life.number].open('ab') as file:
        file.write(line)
