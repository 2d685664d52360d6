"""From a config to the objects that learner and syncer must build alike.

The layout of fragments, the codecs and the outer optimizer follow from the config and the shapes of
the model alone, so processes do not exchange them. The agreement text holds the settings that they
follow from, and a digest of the layout, which proves that learner and syncer built the same one.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import optax

from diloco_jax.config import run_config
from diloco_jax.numerics import codecs, fragments, merge, outer
from diloco_jax.protocol import agreement
from diloco_jax.protocol import config as protocol_config
from diloco_jax.train import model as model_lib
from diloco_jax.train import moments, optimizer


@dataclasses.dataclass(frozen=True)
class Assembly:
  """The objects of a config, built once per process."""

  config: run_config.Config
  protocol: protocol_config.ProtocolConfig
  shapes: Any  # the model's parameters as ShapeDtypeStructs
  layout: fragments.Layout
  codec_up: codecs.Codec
  codec_down: codecs.Codec
  rules: dict[str, merge.MergeRule]  # by the label of a tensor (train/model.py)
  transform: optax.GradientTransformation  # the outer optimizer, applied to the merged gradient
  agreement: str

  @property
  def payload_bytes(self) -> tuple[int, ...]:
    """Size of each fragment's pseudo-gradient on the wire."""
    layout = self.layout
    return tuple(self.codec_up.encoded_size(layout.size(p)) for p in range(layout.num_fragments))

  @property
  def parameters(self) -> int:
    return sum(self.layout.parameters(p) for p in range(self.layout.num_fragments))

  @property
  def max_payload_bytes(self) -> int:
    """The largest payload that a learner or the syncer may announce: a donor's inner optimizer
    state, or a whole fragment in float32."""
    fragments_ = (self.layout.size(p) for p in range(self.layout.num_fragments))
    return max(4 * max(fragments_), self.moments_bytes)

  @property
  def moments_bytes(self) -> int:
    """Size of a donation: the inner optimizer's state."""
    tx = optimizer.make_optimizer(self.config.optimizer, self.config.train.steps)
    return moments.size_bytes(jax.eval_shape(tx.init, self.shapes))

  def outer_optimizer(self, p: int) -> outer.OuterOptimizer:
    """Merge rules by label, then the optax transform, for fragment p."""
    rule = merge.by_label(self.rules, fragments.labels(self.layout, p))
    return outer.outer_optimizer(rule, self.transform)


def assemble(config: run_config.Config) -> Assembly:
  """Builds the objects of a validated config.

  Raises:
    ValueError: the model has too few tensors for P, or a codec, merge rule or outer optimizer is
      unknown or has wrong arguments.
  """
  vocabulary = _make(config, 'embedding_merge', merge.make)
  shapes = jax.eval_shape(lambda: model_lib.init_params(config.model, config.train.seed))
  layout = fragments.make_layout(
    config.sync.fragmentation, shapes, config.sync.fragments, model_lib.label
  )
  return Assembly(
    config=config,
    protocol=config.protocol(),
    shapes=shapes,
    layout=layout,
    codec_up=_make(config, 'codec_up', codecs.get),
    codec_down=_make(config, 'codec_down', codecs.get),
    rules={
      'body': _make(config, 'merge', merge.make),
      'embedding': vocabulary,
      'head': vocabulary,
    },
    transform=_make(config, 'outer', outer.make),
    agreement=agreement.encode({**config.agreement(), 'layout': layout.digest()}),
  )


def _make(config: run_config.Config, name: str, make: Callable[[str], Any]) -> Any:
  """Makes the object of a spec in config.sync. Raises ValueError, which names the setting."""
  try:
    return make(getattr(config.sync, name))
  except ValueError as error:
    raise ValueError(f'sync.{name}: {error}') from None
