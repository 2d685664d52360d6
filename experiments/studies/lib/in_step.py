"""Outer steps of a study that drives learners itself, in lock step."""

from collections.abc import Sequence

import jax
import numpy as np

from diloco_jax.config import build
from diloco_jax.protocol import actions
from diloco_jax.syncer import global_model


def merge(
  assembled: build.Assembly,
  theta: global_model.Theta,
  p: int,
  anchor_N: np.ndarray,
  values: Sequence[jax.Array],
  tokens: int,
  steps: int,
) -> None:
  """Carries out an outer step of fragment p.

  Args:
    assembled: of the run.
    theta: the global model.
    p: the fragment.
    anchor_N: its value from which the learners began.
    values: that of each learner, float32[N], after so many inner steps, and tokens, of its own.
    tokens, steps: of each.
  """
  payloads = [np.asarray(assembled.codec_up.encode(anchor_N - one)[0]) for one in values]
  who = [
    actions.Participant(
      learner=f'l{m}',
      incarnation=1,
      payload_id=m,
      tokens=tokens,
      steps=steps,
      least=0,
      limit=None,
      crc32=0,
    )
    for m in range(len(values))
  ]
  theta.merge(p, who, payloads, ())
