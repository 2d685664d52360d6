"""A run of training loops of the user's own (api/peer.py): the syncer's config.

    diloco syncer --config=own_loop --config.train.steps=300 --workdir=runs/own

The first learner that joins brings the model, so there is none here, and `diloco train` cannot
start such a run. `diloco_jax.run_syncer` without `sync=` has the same settings; a loop uses the
settings of the syncer that it joins.

With `--config=own_loop:alone` one learner makes the bits of its loop without a syncer
(docs/tutorials/own_loop.md).
"""

import dataclasses

from diloco_jax.config import run_config

VARIANTS = '', 'alone'


def get_config(variant: str = '') -> run_config.Config:
  """Two learners and four fragments, so the model must have four arrays at least. 'alone': one
  learner in lock step, whose own value is what is merged and published, in float32."""
  sync = run_config.SyncConfig(
    learners=2,
    quorum=1,
    fragments=4,
    period=8,
    overlap=2,
    outer='nesterov(learning_rate=0.7, momentum=0.6)',
    checkpoint_every_syncs=100,
  )
  if variant == 'alone':
    same = {'merge': 'avg', 'embedding_merge': 'avg', 'outer': 'sgd(learning_rate=1.0)'}
    plain = {'codec_up': 'float32', 'codec_down': 'float32', 'overlap': 0}
    sync = dataclasses.replace(sync, learners=1, fragments=1, **same, **plain)
  elif variant:
    raise ValueError(f"there is no variant {variant!r}; own_loop has 'alone'")
  return run_config.Config(name='own_loop', task=run_config.OWN_LOOP, sync=sync)
