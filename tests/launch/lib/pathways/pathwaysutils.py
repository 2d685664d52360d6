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
  hosts = lambda one: one.client is proxy and one.id >= DEVICES
  accelerator = lambda one: one.client is proxy and one.id < DEVICES

  def replaced(owner: type, name: str, mine, value) -> None:
    """An attribute of C++, replaced for those objects that `mine` names."""
    before = getattr(owner, name, None)
    read = lambda one: before.__get__(one) if before is not None else None
    setattr(owner, name, property(lambda one: value(one) if mine(one) else read(one)))

  def no_stats():
    raise jax.errors.JaxRuntimeError(
      'INVALID_ARGUMENT: MemoryStats is only supported for addressable PjRt devices.'
    )

  replaced(device, 'slice_index', accelerator, lambda one: one.id % SLICES)
  replaced(device, 'colocation_id', lambda one: one.client is proxy, lambda one: one.id % SLICES)
  replaced(device, 'device_kind', accelerator, lambda one: 'TPU stub')
  replaced(device, 'memory_stats', accelerator, lambda one: no_stats)
  found = [one for one in proxy.devices() if not hosts(one)]
  is_proxy = lambda one: one is proxy
  replaced(client, 'devices', is_proxy, lambda one: lambda: list(found))
  replaced(client, 'runtime_type', is_proxy, lambda one: 'proxy/pathways')
  return proxy
