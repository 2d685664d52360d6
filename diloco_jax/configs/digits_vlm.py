"""A vision-language model that describes handwritten digits: 'a seven of 23 dark pixels'.

    diloco train --config=digits_vlm

The task 'vision' (train/vision.py) on the images of scikit-learn (train/digits.py), which
`pip install '.[vision]'` brings and ./scripts/train.sh has. Four learners, the small model
of stdlib_lm; an image is 16 patches of 2 x 2 pixels in front of its caption.
"""

from diloco_jax.config import run_config
from diloco_jax.configs import stdlib_lm
from diloco_jax.train import digits


def get_config(variant: str = '') -> run_config.Config:
  """Four learners."""
  if variant:
    raise ValueError(f'there is no variant {variant!r}; digits_vlm has none')
  config = stdlib_lm.small()
  config.name, config.task = 'digits_vlm', run_config.VISION
  config.data.corpus, config.data.seq_len = digits.NAME, 26
  config.data.eval_batches, config.data.eval_batch_size = 11, 32
  config.train.steps = 400
  return config
