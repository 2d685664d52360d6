"""Learners that fine-tune by LoRA exchange its matrices and nothing else (experiments/examples)."""

import threading

import jax
import numpy as np
import pytest
from flax import nnx

import diloco_jax
from diloco_jax.report import folder
from tests.runs.lib import gated_loop

DEADLINE_S = 240


@pytest.mark.full
def test_the_wire_carries_the_share_of_the_parameters_that_are_trained(tmp_path, monkeypatch):
  """And the frozen ones stay as they were."""
  lora = gated_loop.example('lora')
  # Wide, so that payloads outweigh the control messages, and short.
  for name, value in {'WIDTH': 768, 'RANK': 16, 'BATCH': 64, 'STEPS': 48}.items():
    monkeypatch.setattr(lora, name, value)
  lora.pretrain(tmp_path / 'base.safetensors')

  def learn(name: str, trained, address: str) -> None:
    monkeypatch.setattr(lora.nnx, 'LoRAParam', trained)
    with jax.numpy_dtype_promotion('standard'), jax.numpy_rank_promotion('allow'):
      losses[name] = lora.train(tmp_path / 'base.safetensors', learner=name, syncer=address)

  wire, sizes, losses = {}, {}, {}
  for what, trained in {'lora': nnx.LoRAParam, 'all': nnx.Param}.items():
    workdir = tmp_path / what
    with diloco_jax.run_syncer(total_steps=lora.STEPS, workdir=workdir) as server:
      threads = [
        threading.Thread(target=learn, args=(name, trained, server.address), daemon=True)
        for name in ('l0', 'l1')
      ]
      for thread in threads:
        thread.start()
      params = server.wait(DEADLINE_S)
      for thread in threads:
        thread.join(DEADLINE_S)
    run = folder.read(workdir).run
    wire[what] = (run.wire.bytes_up + run.wire.bytes_down) / run.outer_steps
    sizes[what] = sum(np.size(leaf) for leaf in jax.tree.leaves(params))
    print(what, wire, sizes, run.wire, {k: (v[0], v[-1]) for k, v in losses.items()})
  assert wire['lora'] / wire['all'] <= 1.05 * sizes['lora'] / sizes['all']
