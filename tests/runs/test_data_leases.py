"""Learners and syncer end in turn: every committed batch counts once.

The run is a day of lib/day.py; the books are those of batches.py.
"""

import pytest

from tests.runs.lib import batches


@pytest.fixture(scope='module', name='books')
def _books(day) -> batches.Books:
  return batches.keep(day)


def test_every_committed_batch_was_read_and_counts_once(day, books):
  batches.check(day, books)


def test_only_uncommitted_batches_are_read_again(books):
  """Every position at which no process had stopped is exactly the end of the merged batches."""
  assert len(books.begun) >= 5  # two first processes, and three after a kill
  for shard, cursor, committed in books.begun:
    assert cursor == committed, f'shard {shard} is read from {cursor}, {committed} are committed'
  assert any(cursor for _, cursor, _ in books.begun)


def test_no_batch_is_skipped(books):
  """The batches that were read of every data shard are 0, 1, 2, ..."""
  for shard in {shard for shard, _ in books.reads}:
    read = {batch for of, batch in books.reads if of == shard}
    assert read == set(range(len(read))), shard
