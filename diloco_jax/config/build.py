"""From a config to the objects that learner and syncer must build alike.

The layout of fragments, the codecs and the outer optimizer follow from the config and the shapes of
the model alone, so no process tells them to another; the agreement text says what they follow from,
and its digest of the layout proves that both came to the same.
"""

import dataclasses
import socket
from collections.abc import Callable
from typing import Any

import jax
import optax

from diloco_jax.config import run_config
from diloco_jax.numerics import codecs, fragments, merge, outer
from diloco_jax.protocol import agreement
from diloco_jax.protocol import config as protocol_config
from diloco_jax.protocol.learner import machine as learner_machine
from diloco_jax.train import model as model_lib
from diloco_jax.train import moments, optimizer


@dataclasses.dataclass(frozen=True)
class Assembly:
  """What a config means, worked out once per process."""

  config: run_config.Config
  protocol: protocol_config.ProtocolConfig
  shapes: Any  # the model's parameters as ShapeDtypeStructs
  layout: fragments.Layout
  codec_up: codecs.Codec
  codec_down: codecs.Codec
  rules: dict[str, merge.MergeRule]  # of merging, by the label of a tensor (train/model.py)
  transform: optax.GradientTransformation  # what the outer optimizer makes of a merged gradient
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
    """The largest payload that either side may announce: the inner optimizer's state of a donor, or
    a whole fragment in float32."""
    fragments_ = (self.layout.size(p) for p in range(self.layout.num_fragments))
    return max(4 * max(fragments_), self.moments_bytes)

  @property
  def moments_bytes(self) -> int:
    """Of the inner optimizer's state: what a donation takes."""
    tx = optimizer.make_optimizer(self.config.optimizer, self.config.train.steps)
    return moments.size_bytes(jax.eval_shape(tx.init, self.shapes))

  def outer_optimizer(self, p: int) -> outer.OuterOptimizer:
    """Merge rules by label, then the optax transform, for fragment p."""
    rule = merge.by_label(self.rules, fragments.labels(self.layout, p))
    return outer.outer_optimizer(rule, self.transform)


def assemble(config: run_config.Config) -> Assembly:
  """Works out a validated config. Raises ValueError: the model has too few tensors for P, a codec,
  a merge rule or an outer optimizer is unknown or has wrong arguments."""
  vocabulary = _chosen(config, 'embedding_merge', merge.make)
  shapes = jax.eval_shape(lambda: model_lib.init_params(config.model, config.train.seed))
  layout = fragments.make_layout(
    config.sync.fragmentation, shapes, config.sync.fragments, model_lib.label
  )
  return Assembly(
    config=config,
    protocol=config.protocol(),
    shapes=shapes,
    layout=layout,
    codec_up=_chosen(config, 'codec_up', codecs.get),
    codec_down=_chosen(config, 'codec_down', codecs.get),
    rules={
      'body': _chosen(config, 'merge', merge.make),
      'embedding': vocabulary,
      'head': vocabulary,
    },
    transform=_chosen(config, 'outer', outer.make),
    agreement=agreement.encode({**config.agreement(), 'layout': layout.digest()}),
  )


def _chosen(config: run_config.Config, name: str, make: Callable[[str], Any]) -> Any:
  """What a spec of config.sync stands for. Raises ValueError that names the setting."""
  try:
    return make(getattr(config.sync, name))
  except ValueError as error:
    raise ValueError(f'sync.{name}: {error}') from None


def identity(
  assembled: Assembly, learner: str, nonce: int, pid: int, seed: int
) -> learner_machine.Identity:
  """Who a learner process is; `nonce` names the process, `seed` jitters its redials."""
  return learner_machine.Identity(
    learner=learner,
    nonce=nonce,
    agreement=assembled.agreement,
    host=socket.gethostname(),
    pid=pid,
    seed=seed,
  )
