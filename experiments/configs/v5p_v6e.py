"""Eight TPU slices of two kinds, four v5p and four v6e, with different speeds, far apart.

    diloco syncer --config=experiments/configs/v5p_v6e.py --workdir=runs/v5p_v6e \
      --listen=0.0.0.0:7070 --tls=certs/syncer
    diloco learner --config=experiments/configs/v5p_v6e.py:v5p ...   # docs/operating.md

Too large for a CPU. The model is Gemma 3's 1B shape (diloco_jax/configs/gemma.py), M=8, P=H=13. A
learner is a slice of 16 chips, v5p:2x2x4 or v6e:4x4. A v5p chip has half the FLOP/s of a v6e chip
and three times its memory: so there a learner trains on half of each batch, which counts as much
less in a merge, and computes less of it twice.
"""

from diloco_jax.config import run_config
from diloco_jax.configs import gemma


def get_config(kind: str = 'v6e') -> run_config.Config:
  """The config of the syncer and of a learner on v6e, or of one on 'v5p'."""
  config = gemma.get_config('1b')
  config.name, config.sync.learners = 'v5p_v6e', 8
  config.data.batch_size = 32
  if kind == 'v5p':
    config.data.batch_rows, config.model.remat = 16, 'dots'
  elif kind != 'v6e':
    raise ValueError(f"there is no kind {kind!r}; use 'v5p' or 'v6e'")
  return config
