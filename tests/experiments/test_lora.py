"""Learners that fine-tune by LoRA exchange its matrices and nothing else (experiments/examples)."""

import threading

import jax
import numpy as np
import pytest
from flax import nnx

import diloco_jax
from diloco_jax.configs import own_loop
from diloco_jax.numerics import codecs
from diloco_jax.report import folder, records
from tests.runs.lib import gated_loop

DEADLINE_S = 240


@pytest.mark.full
def test_the_wire_carries_the_share_of_the_parameters_that_are_trained(tmp_path, monkeypatch):
  """Of what the whole model would be in the same payloads; and two learners learn."""
  lora, losses, base = gated_loop.example('lora'), {}, tmp_path / 'base.safetensors'
  # Wide, so that payloads outweigh the control messages, and short.
  for name, value in {'WIDTH': 768, 'RANK': 16, 'BATCH': 64, 'STEPS': 48}.items():
    monkeypatch.setattr(lora, name, value)
  sync = own_loop.get_config().sync
  sync.quorum = 2  # so that both take part in every outer step

  def learn(name: str) -> None:
    with jax.numpy_dtype_promotion('standard'), jax.numpy_rank_promotion('allow'):
      losses[name] = lora.train(base, learner=name, syncer=server.address, sync=sync)

  with jax.numpy_dtype_promotion('standard'), jax.numpy_rank_promotion('allow'):
    lora.pretrain(base)
    whole = sum(np.size(leaf) for leaf in jax.tree.leaves(nnx.state(lora.Model(nnx.Rngs(0)))))
  with diloco_jax.run_syncer(total_steps=lora.STEPS, workdir=tmp_path / 'run', sync=sync) as server:
    threads = [threading.Thread(target=learn, args=(name,), daemon=True) for name in ('l0', 'l1')]
    for thread in threads:
      thread.start()
    params = server.wait(DEADLINE_S)
    for thread in threads:
      thread.join(DEADLINE_S)
  assert all(np.mean(one[-5:]) < 0.2 * one[0] for one in losses.values()) and len(losses) == 2

  share = sum(np.size(leaf) for leaf in jax.tree.leaves(params)) / whole
  assert share < 0.1
  syncs = [row for row in records.records(tmp_path / 'run') if row['name'] == 'synced']
  merged = sum(len(row['participants']) for row in syncs)  # the last ones may be of one learner
  of_the_whole = share * codecs.get('int8').encoded_size(whole) / sync.fragments
  wire = folder.read(tmp_path / 'run').run.wire
  assert 0.9 < wire.bytes_up / (merged * of_the_whole) <= 1.05
  assert 0.9 < wire.bytes_down / (2 * len(syncs) * of_the_whole) <= 1.05
