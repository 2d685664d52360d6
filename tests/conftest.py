"""The settings under which every test runs: eight emulated devices, and no silent conversions.

Strict dtype promotion and no rank promotion turn an accidental float64, a weak type that widened or
a broadcast nobody wrote into an error. Asynchronous dispatch is off because free-running emulated
devices can miss their rendezvous on a small machine. Compiled functions are kept in .cache.
"""

import os
import pathlib

os.environ.setdefault('JAX_PLATFORMS', 'cpu')
os.environ.setdefault('MPLBACKEND', 'Agg')

import jax
from absl import flags

_CACHE = pathlib.Path(__file__).resolve().parents[1] / '.cache' / 'jax-tests'
for _name, _value in {  # in the environment too, for the processes that tests start
  'jax_compilation_cache_dir': str(_CACHE),
  'jax_persistent_cache_min_compile_time_secs': 0.0,
  'jax_persistent_cache_min_entry_size_bytes': -1,
}.items():
  os.environ[_name.upper()] = str(_value)
  jax.config.update(_name, _value)
jax.config.update('jax_num_cpu_devices', 8)
jax.config.update('jax_cpu_enable_async_dispatch', False)
jax.config.update('jax_numpy_dtype_promotion', 'strict')
jax.config.update('jax_numpy_rank_promotion', 'raise')

flags.FLAGS.mark_as_parsed()  # grain reads absl flags
