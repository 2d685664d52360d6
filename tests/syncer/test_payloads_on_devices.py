"""In a single controller payloads stay on devices; the bits are those of separate processes."""

import collections

import jax
import numpy as np
import pytest

import diloco_jax
from diloco_jax.api import single_controller
from diloco_jax.config import build
from diloco_jax.configs import stdlib_lm
from diloco_jax.learner import split
from diloco_jax.storage import files as files_lib
from diloco_jax.storage import outer_log, wal
from diloco_jax.syncer import commit, global_model
from diloco_jax.transport import payloads as payloads_lib

SEAMS = (
  (split, 'to_wire'),
  (split, 'from_wire'),
  (split, 'values'),
  (payloads_lib.isal_zlib, 'crc32'),
)


def _config(steps: int, axis: str, learners: int = 3):
  config = stdlib_lm.get_config('tiny')
  config.model.num_kv_heads = config.model.num_heads
  config.sync.learners, config.sync.quorum = learners, 1
  config.mesh.data = 1
  setattr(config.mesh, axis, 2)
  config.train.steps, config.train.eval_every = steps, 0
  config.sync.checkpoint_every_syncs = config.train.checkpoint_every_steps = 0
  return config


@pytest.mark.full
@pytest.mark.parametrize('axis, codec', [('data', 'int8'), ('tensor', 'int4')])
def test_no_payload_passes_through_the_host(tmp_path, monkeypatch, axis, codec):
  """Three islands of two devices, the syncer on two more. The log is the one copy,
  and the Theta of a syncer process repeats it, with the same digest after every outer step."""
  calls, copied = collections.Counter(), []
  for module, name in SEAMS:
    monkeypatch.setattr(module, name, _counted(calls, name, getattr(module, name)))
  to_host = payloads_lib.to_host
  monkeypatch.setattr(
    payloads_lib, 'to_host', lambda payload: copied.append(to_host(payload)) or copied[-1]
  )
  monkeypatch.setattr(commit.CommitLog, 'compact_behind', lambda *args: None)  # it stays whole
  config = _config(300, axis)
  config.sync.codec_up = codec
  exits = single_controller.run(config, tmp_path).exits
  assert {ended.code for ended in exits.values()} == {0}, exits
  assert not calls, calls

  assembled = build.assemble(config)
  theta, records, size_bytes = global_model.Theta(assembled), 0, 0
  copied_bytes = sum(payload.nbytes for payload in copied)
  files = files_lib.Files(tmp_path / 'syncer' / 'wal')
  for record in wal.open_log(files, outer_log.run_of(assembled.agreement)).records():
    step = outer_log.decode(record.payload)
    assert len(step.gradient) == assembled.codec_log.encoded_size(
      assembled.layout.size(step.merge.fragment)
    )
    size_bytes += len(step.gradient)
    outer_log.redo(theta, record, 'the log')  # raises if a bit differs
    records += 1
  assert records > 4 and copied_bytes == size_bytes
  trained = diloco_jax.load_params(tmp_path)
  jax.tree.map(np.testing.assert_array_equal, theta.params(), trained)


def _counted(calls, name, function):
  def counted(*args, **kwargs):
    calls[name] += 1
    return function(*args, **kwargs)

  return counted
