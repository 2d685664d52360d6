"""One process fills the compilation cache of a phase, before others look for the same programs."""

from diloco_jax.config import load, run_config
from diloco_jax.verification.virtual import virtual


def configure(name: str, settings: tuple[str, ...]) -> run_config.Config:
  """The config with settings as on a command line, of numbers, words and truth values."""
  config = load.load(name)
  for setting in settings:
    (section, field), value = setting.partition('=')[0].split('.'), setting.partition('=')[2]
    part = getattr(config, section)
    kind = type(getattr(part, field))
    setattr(part, field, value == 'true' if kind is bool else kind(value))
  config.validate()
  return config


def fill(config: run_config.Config) -> None:
  """Trains one learner and its syncer in this process, until each fragment was merged."""
  config.sync.learners = config.sync.quorum = 1
  config.train.steps, config.optimizer.warmup_steps = 2 * config.sync.period, 1
  virtual.train(config)
