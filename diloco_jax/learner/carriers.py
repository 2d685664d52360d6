"""Carriers: how the payloads of an island travel between its devices and the syncer.

As bytes through the memory of its host, as bytes of several hosts, of which the lead sends them, or
as arrays of jax to a syncer in this process (node/payload.py). The arithmetic is the same
(on_device.py).
"""

import functools
import threading
from collections.abc import Callable
from concurrent import futures

import jax
import numpy as np

from diloco_jax.learner import split
from diloco_jax.node import payload as payload_lib
from diloco_jax.numerics import codecs

Lower = Callable[..., jax.stages.Lowered]


class CompiledFunctions:
  """Functions that are compiled on first use, each once, or ahead of it.

  Attributes:
    compiled: by the name and the arguments of what lowers them; islands with an equal model on the
      same devices may share it.
    launches: of functions: as many on each host of a learner.
  """

  def __init__(self, compiled: dict[tuple, futures.Future] | None = None):
    self.compiled = {} if compiled is None else compiled
    self.launches = 0
    self._lock = threading.Lock()

  def get(self, lower: Lower, *key) -> Callable:
    """Returns a compiled function; the first caller compiles it and later callers wait. After a
    failure the next caller tries again."""
    name = lower.__name__, *key
    with self._lock:
      known = self.compiled.get(name)
      if known is None:
        new = self.compiled[name] = futures.Future()
    if known is not None:
      return known.result()
    try:
      new.set_result(lower(*key).compile())
    except BaseException as error:
      del self.compiled[name]
      new.set_exception(error)
      raise
    return new.result()

  def launch(self, lower: Lower, *key) -> Callable:
    """The function, for a call that counts."""
    self.launches += 1
    return self.get(lower, *key)


class Bytes:
  """Payloads are bytes in the memory of this host.

  Attributes:
    from_host: whether payloads arrive in its memory.
  """

  from_host = True

  def __init__(
    self,
    programs: CompiledFunctions,
    codec_up: codecs.Codec,
    codec_down: codecs.Codec,
    replicated: jax.sharding.Sharding | None,
  ):
    """`replicated`: the sharding of an array that every device of the island has whole."""
    self._programs = programs
    self._codec_up, self._codec_down = codec_up, codec_down
    self._replicated = replicated

  def needs(self, kind: split.Kind) -> list[tuple]:
    """What it has compiled for a fragment, as arguments of `CompiledFunctions.get`."""
    del kind
    return []

  def collect(self, kind: split.Kind, data: jax.Array) -> jax.Array:
    """Starts to bring an encoded pseudo-gradient, a flat array, to where `payload` takes it."""
    del kind
    return data

  def payload(self, kind: split.Kind, data: jax.Array) -> payload_lib.Payload:
    """What `collect` returned, as it travels; waits for the device."""
    return split.to_wire(kind, self._codec_up, data)

  def flat(self, kind: split.Kind, payload: payload_lib.Payload, whole: bool) -> jax.Array:
    """A payload that has arrived as a flat array of the island: float32 if it is a `whole` value,
    and a new array, which may be donated."""
    data = np.frombuffer(payload, np.uint8)
    return split.values(kind, data) if whole else split.from_wire(kind, self._codec_down, data)

  def _encoded(self, kind: split.Kind) -> jax.ShapeDtypeStruct:
    return kind.like(self._codec_up.encoded_size(kind.size), np.uint8)


class HostsBytes(Bytes):
  """The same for an island on several hosts: each has all of the bytes, and the lead sends them."""

  def needs(self, kind: split.Kind) -> list[tuple]:
    return [(self._lower_wire, kind)]

  def collect(self, kind: split.Kind, data: jax.Array) -> jax.Array:
    return self._programs.launch(self._lower_wire, kind)(data)

  def payload(self, kind: split.Kind, data: jax.Array) -> payload_lib.Payload:
    whole = data if data.is_fully_addressable else data.addressable_data(0)
    return super().payload(kind, whole)

  def _lower_wire(self, kind: split.Kind) -> jax.stages.Lowered:
    return kind.jit(lambda data: data, self._replicated).lower(self._encoded(kind))


class Arrays(Bytes):
  """Payloads are arrays of jax: the syncer is in this process. An array of several devices has the
  order of the wire, in which the syncer and the other islands read it."""

  from_host = False

  def __init__(self, *arguments):
    super().__init__(*arguments)
    self._orders: dict[split.Kind, split.Order] = {}  # on the devices

  def needs(self, kind: split.Kind) -> list[tuple]:
    return [(self._lower_wire, kind), (self._lower_flat, kind, False)] if kind.parts > 1 else []

  def collect(self, kind: split.Kind, data: jax.Array) -> jax.Array:
    if kind.parts == 1:
      return data
    return self._programs.launch(self._lower_wire, kind)(data, self._order(kind).flat_B)

  def payload(self, kind: split.Kind, data: jax.Array) -> payload_lib.Payload:
    return data

  def flat(self, kind: split.Kind, payload: payload_lib.Payload, whole: bool) -> jax.Array:
    if not payload_lib.is_on_devices(payload):
      return super().flat(kind, payload, whole)
    data = jax.device_put(payload, self._replicated, may_alias=not whole)
    if kind.parts == 1:
      return data
    return self._programs.launch(self._lower_flat, kind, whole)(data, self._order(kind).wire_F)

  def _order(self, kind: split.Kind) -> split.Order:
    if kind not in self._orders:
      self._orders[kind] = jax.device_put(split.order(kind), self._replicated)
    return self._orders[kind]

  def _lower_wire(self, kind: split.Kind) -> jax.stages.Lowered:
    wire = functools.partial(split.reorder, self._codec_up.sections, (kind.parts, 1))
    return kind.jit(wire, self._replicated).lower(self._encoded(kind), self._order(kind).flat_B)

  def _lower_flat(self, kind: split.Kind, whole: bool) -> jax.stages.Lowered:
    widths, order = (codecs.BLOCK,) if whole else self._codec_down.sections, self._order(kind)
    sharding = split.automatic(self._replicated)
    dtype = np.float32 if whole else np.uint8
    wire = jax.ShapeDtypeStruct((len(order.flat_B) * sum(widths),), dtype, sharding=sharding)
    flat = functools.partial(split.reorder, widths, (1, kind.parts))
    return kind.jit(flat, kind.sharding).lower(wire, order.wire_F)
