"""Tapes, facts and account of a run of real processes."""

import pathlib
from typing import Any

from diloco_jax.protocol import config as config_lib
from diloco_jax.report import book as book_lib
from diloco_jax.report import facts, records
from diloco_jax.verification.checks import judge_tapes
from diloco_jax.verification.replay import tape_files


def node_tapes(workdir: pathlib.Path) -> list[judge_tapes.Tape]:
  """The tapes of a run. Raises ValueError if it has none."""
  found = [(life.name, tape_files.read(life)) for life in tape_files.find(workdir)]
  return [
    judge_tapes.Tape(name, reader.header.start, reader) for name, reader in found if reader.header
  ]


def account(
  workdir: pathlib.Path, config: config_lib.ProtocolConfig, until_ns: int
) -> book_lib.Book:
  """The book of a run until a time, from its records."""
  book = book_lib.Book(config.quorum, config.period / config.fragments)
  for at_ns, who, fact in facts_of(workdir, object):
    if at_ns <= until_ns and fact is not None:
      book.take(who, at_ns, fact)
  return book


def facts_of(workdir: pathlib.Path, *kinds: type) -> list[tuple[int, str, Any]]:
  """The facts of these kinds in the records of a run: (time, process, fact) in order."""
  rows = ((row['t_ns'], who, facts.parse(row)) for who, row in records.TailAll(workdir).read())
  return sorted((row for row in rows if isinstance(row[2], kinds)), key=lambda row: row[0])
