"""The tables of states decide as they are drawn, and docs/protocol.md explains every reason."""

import pathlib

import pytest

from diloco_jax.protocol import messages
from diloco_jax.protocol import states as protocol_states
from diloco_jax.protocol.learner import connection
from diloco_jax.protocol.learner import machine as learner_machine
from diloco_jax.protocol.syncer import members as members_lib
from diloco_jax.protocol.syncer import sync as sync_lib

PAGE = (pathlib.Path(__file__).parents[2] / 'docs' / 'protocol.md').read_text()
TABLES = (
  sync_lib.SYNC_STATES,
  members_lib.COPY_STATES,
  connection.CONNECTION_STATES,
  learner_machine.TRAINING_STATES,
)


@pytest.mark.parametrize('table', TABLES, ids=('sync', 'copy', 'connection', 'training'))
def test_a_move_that_is_not_drawn_is_refused(table):
  drawn = {row[:2] for row in table}
  for source, target in drawn:
    assert protocol_states.move(table, source, target) == target
    if (target, source) not in drawn:
      with pytest.raises(AssertionError, match=f'no move from {target} to {source}'):
        protocol_states.move(table, target, source)


def test_every_reason_is_explained():
  for reason in messages.Reason.ALL:
    assert f'`{reason}`' in PAGE, reason
