"""Stands in for the package of this name, and for Pathways: two slices of four devices.

Behaves as pathwaysutils 0.1.13 and jaxlib's proxy do, where our code could notice. The slices
belong to a client of their own, beside jax's CPU client: no array of one is an array of the other.
Device ids of the slices alternate, so that runs of ids are no slices. Each slice has one host,
whose CPU device only `colocated_cpu_devices` finds. What Pathways does silently wrong is an error
here: `initialize` without the proxy, or late, or with a compilation cache.
"""

import jax
from jax._src import xla_bridge
from jax.extend import backend
from jaxlib import xla_client

DEVICES, SLICES = 8, 2


def initialize() -> None:
  if 'proxy' not in (jax.config.jax_platforms or ''):
    raise AssertionError(f'JAX_PLATFORMS is {jax.config.jax_platforms}: no change would be made')
  if xla_bridge.backends_are_initialized():
    raise AssertionError('jax was used before')
  backend.register_backend_factory('proxy', _connect, priority=-1)


def _connect() -> xla_client.Client:
  if jax.config.read('jax_backend_target') != 'grpc://stub':
    raise RuntimeError('Unable to establish connection to ifrt_proxy server')
  if jax.config.jax_enable_compilation_cache:
    raise AssertionError('the compilation cache is on')
  proxy = xla_client.make_cpu_client(asynchronous=False, num_devices=DEVICES + SLICES)
  device, client = xla_client.Device, xla_client.Client
  hosts = lambda obj: obj.client is proxy and obj.id >= DEVICES
  accelerator = lambda obj: obj.client is proxy and obj.id < DEVICES

  def replace(owner: type, name: str, applies, value) -> None:
    """An attribute of C++, replaced for those objects to which it `applies`."""
    before = getattr(owner, name, None)
    read = lambda obj: before.__get__(obj) if before is not None else None
    setattr(owner, name, property(lambda obj: value(obj) if applies(obj) else read(obj)))

  def no_stats():
    raise jax.errors.JaxRuntimeError(
      'INVALID_ARGUMENT: MemoryStats is only supported for addressable PjRt devices.'
    )

  replace(device, 'slice_index', accelerator, lambda obj: obj.id % SLICES)
  replace(device, 'colocation_id', lambda obj: obj.client is proxy, lambda obj: obj.id % SLICES)
  replace(device, 'device_kind', accelerator, lambda obj: 'TPU stub')
  replace(device, 'memory_stats', accelerator, lambda obj: no_stats)
  visible = [entry for entry in proxy.devices() if not hosts(entry)]
  is_proxy = lambda obj: obj is proxy
  replace(client, 'devices', is_proxy, lambda obj: lambda: list(visible))
  replace(client, 'runtime_type', is_proxy, lambda obj: 'proxy/pathways')
  return proxy
