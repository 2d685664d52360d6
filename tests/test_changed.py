"""The lane of a change has the tests that are nearest to it."""

import pytest

from tests import changed


@pytest.mark.parametrize(
  'path, first',
  [
    ('diloco_jax/numerics/merge.py', 'tests/numerics/test_merge.py'),
    ('diloco_jax/api/peer.py', 'tests/api/test_peer.py'),
    ('diloco_jax/report/picture.py', 'tests/report/test_summary.py'),
    ('docs/operating.md', 'tests/scripts/test_documents.py'),
    ('tests/syncer/test_stored.py', 'tests/syncer/test_stored.py'),
    ('tests/conftest.py', 'tests/test_lint.py'),
  ],
)
def test_a_change_is_reached_by_its_own_tests(path, first):
  selection = changed.select([path], {})
  assert selection.changed == [path] and first in selection.files
  assert not set(selection.files) & set(selection.left_out)


def test_what_does_not_fit_into_the_budget_is_left_out_and_named():
  far = dict.fromkeys(changed.select(['diloco_jax/protocol/ids.py'], {}).files, 50.0)
  selection = changed.select(['diloco_jax/protocol/ids.py'], far, budget_s=100.0)
  assert selection.left_out and f'{len(selection.left_out)} others' in str(selection)


def test_the_tests_of_a_file_take_part_however_long_they_are():
  selection = changed.select(['diloco_jax/api/peer.py'], {'tests/api/test_peer.py': 1e6})
  assert 'tests/api/test_peer.py' in selection.files


def test_real_runs_take_part_if_they_have_changed():
  real = 'tests/runs/test_syncer_kills.py'
  assert real in changed.select([real], {}, ('tests/runs/',)).files
  assert real in changed.select(['tests/runs/lib/failpoints.py'], {}, ('tests/runs/',)).left_out
