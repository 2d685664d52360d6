"""The manifest of a run snapshot says what of it the syncer has seen."""

import pathlib

import jax.numpy as jnp
import pytest

from diloco_jax.config import build
from diloco_jax.configs import stdlib_lm
from diloco_jax.launch import restore
from diloco_jax.protocol import actions
from diloco_jax.storage import checkpoint, manifests
from diloco_jax.syncer import snapshot_work

BOOKS = {'log': 3, 'chain': '00' * 32, 'members': []}


def _save(node: pathlib.Path) -> checkpoint.Saved:
  checkpoints = checkpoint.Checkpoints(str(node / manifests.CHECKPOINTS))
  saved = checkpoints.save(7, {'w': jnp.ones(4)}, 0, BOOKS, snapshot=1)()
  checkpoints.close()
  return saved


def test_parts_that_are_not_here_are_named_and_a_restore_asks(tmp_path):
  """Invented, of another number, or no words about a checkpoint at all."""
  config = stdlib_lm.get_config('tiny')
  own = _save(manifests.syncer_folder(tmp_path))
  saved = _save(manifests.island_folder(tmp_path, 'l0'))
  _save(manifests.island_folder(tmp_path, 'l2'))
  told = {
    'l0': saved,
    'l1': checkpoint.Saved(7, '0' * 64),
    'l2': checkpoint.Saved(8, saved.record_sha256),
    'l3': checkpoint.Saved(7, '../../l0'),
    'l4': checkpoint.Saved(-1, '0' * 64),
  }
  written = snapshot_work.write(
    tmp_path,
    build.assemble(config).agreement,
    actions.WriteManifest(
      snapshot=1,
      clock=7,
      checkpoint=own.number,
      record_sha256=own.record_sha256,
      parts=tuple(
        actions.Part(
          learner=name, incarnation=1, checkpoint=one.number, record_sha256=one.record_sha256
        )
        for name, one in told.items()
      ),
      missing=(('l5', 'it says \x1b[2J' * 1000),),
    ),
  )
  assert (written.error, written.unverified) == ('', ('l1', 'l2', 'l3', 'l4'))
  manifest = manifests.read(tmp_path, 1)
  assert (set(manifest.learners), manifest.unverified) == ({'l0', 'l1', 'l2'}, ('l1', 'l2'))
  assert {name for name, _ in manifest.missing} == {'l3', 'l4', 'l5'}
  assert restore.shown(dict(manifest.missing)['l5']).isprintable()
  with pytest.raises(ValueError, match='2 of the 3 parts .* --without=l1,l2 '):
    restore.choose(config, tmp_path, restore.Asked('latest'), print)
  goal = restore.choose(config, tmp_path, restore.Asked('latest', without=('l1', 'l2')), print)
  assert set(goal.manifest.learners) == {'l0'}
