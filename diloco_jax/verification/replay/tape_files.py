"""Reads the tapes that the processes of a run wrote (storage/tapes.py), and replays them."""

import gzip
import pathlib
import zlib
from collections.abc import Iterator, Sequence
from typing import Any

from diloco_jax.protocol import safe_json
from diloco_jax.protocol.tape import tape as tape_lib
from diloco_jax.storage import tapes
from diloco_jax.verification.replay import machines as replay_machines

MAX_LINE_BYTES = safe_json.MAX_BYTES  # gzip makes 1000 of each byte


class Lines:
  """The lines of a tape's segments; `where` names file and number of the last line read."""

  def __init__(self, segments: Sequence[pathlib.Path]):
    self._segments = segments
    self._path: pathlib.Path | None = None
    self._number = 0

  def __iter__(self) -> Iterator[bytes]:
    """Raises TapeError for a segment that cannot be unpacked, OSError for a missing one."""
    for path in self._segments:
      self._path = path
      if not self._path.exists():  # packed since the listing
        self._path = self._path.with_name(f'{self._path.name}.gz')
      opener = gzip.open if self._path.suffix == '.gz' else open
      with opener(self._path, 'rb') as file:
        yield from self._numbered(file)

  def _numbered(self, file: Any) -> Iterator[bytes]:
    self._number = 0
    while True:
      self._number += 1
      try:
        line = file.readline(MAX_LINE_BYTES + 1)
      except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise tape_lib.TapeError(f'{self.where()}: cannot be unpacked: {error}') from None
      if not line:
        return
      if len(line) > MAX_LINE_BYTES:
        raise tape_lib.TapeError(
          f'{self.where()}: it is longer than {MAX_LINE_BYTES} bytes, which no line of a tape is'
        )
      yield line

  def where(self) -> str:
    return f'{self._path}, line {self._number}'


def find(path: pathlib.Path) -> list[tapes.ProcessTape]:
  """The tapes that a path names: a folder (of tapes, or of a run), or a file.

  A segment names its whole tape; a file with another name is a tape by itself.

  Raises:
    ValueError: there is no such path, or no tape in it.
  """
  if path.is_dir():
    folder = path / tapes.TAPES if (path / tapes.TAPES).is_dir() else path
    process_tapes = tapes.process_tapes(folder)
    if not process_tapes:
      raise ValueError(f'there are no tapes in {folder} (NODE.LIFE.SEGMENT.jsonl)')
    return process_tapes
  if not path.is_file():
    raise ValueError(f'there is no tape {path} (seen from {pathlib.Path.cwd()})')
  if not tapes.NAME.fullmatch(path.name):
    return [tapes.ProcessTape(path.name, 0, (path,))]
  node, number, _ = tapes.parse(path)
  return [
    process_tape
    for process_tape in tapes.process_tapes(path.parent)
    if (process_tape.node, process_tape.number) == (node, number)
  ]


def replay(process_tape: tapes.ProcessTape) -> replay_machines.Replay:
  """Replays a tape. Raises tape.TapeError that names file and line, or file and node."""
  lines = Lines(process_tape.segments)
  replayed = replay_machines.replay(lines, lines.where)
  _require_node(process_tape, replayed.header)
  return replayed


def read(process_tape: tapes.ProcessTape) -> tape_lib.Reader:
  """Reads the header and the turns of a tape. Raises tape.TapeError, here and while iterating."""
  lines = Lines(process_tape.segments)
  reader = tape_lib.Reader(lines, lines.where)
  _require_node(process_tape, reader.header)
  return reader


def _require_node(process_tape: tapes.ProcessTape, header: tape_lib.Header | None) -> None:
  if header is not None and process_tape.number and header.node != process_tape.node:
    raise tape_lib.TapeError(
      f'{process_tape.segments[0]} is a tape of {header.node}, not of {process_tape.node}'
    )
