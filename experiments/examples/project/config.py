"""The settings of the run. All learners take them from the syncer; a loop repeats none.

`diloco syncer --helpfull` lists every setting. For one run: ./run.sh --config.sync.period=32
"""

from diloco_jax.configs import own_loop


def get_config():
  config = own_loop.get_config()
  config.train.steps = 300  # the clock at which the run ends
  config.sync.learners = 2  # the run begins once so many have joined, or 20 s after the first
  config.sync.fragments = 2  # parts in which the model is exchanged, one after the other
  config.sync.period = 16  # inner steps between two merges of a part
  return config
