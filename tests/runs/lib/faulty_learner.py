"""The program of a learner (`diloco learner`) on faulty hardware.

--spoil=nan:N or huge:N spoils its pseudo-gradients from the N-th on, behind its encoder (an integer
codec): scales that mean NaN, or values far too large.
"""

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags

from diloco_jax.launch import cli as cli_lib
from diloco_jax.launch import nodes
from diloco_jax.launch import supervisor as supervisor_lib
from diloco_jax.learner import work as learner_work
from tests.runs.lib import conductor

_SCALES = {'nan': 255, 'huge': 150}  # exponent bytes of a block (numerics/codecs.py)
_SPOILED_BLOCKS = 8


def instead(program: supervisor_lib.Program, *faults: str) -> supervisor_lib.Program:
  """Replaces a learner's program by this one; `faults`: flags of it."""
  return conductor.instead(program, __spec__.name, *faults)


class Spoiler:
  """Spoils a learner's payloads from the N-th on.

  >>> spoiler = Spoiler('nan:2')
  >>> [list(spoiler(bytes(3))) for _ in range(2)]
  [[0, 0, 0], [255, 255, 255]]
  """

  def __init__(self, text: str):
    how, _, first = text.partition(':')
    if how not in _SCALES or not first.isdigit():
      raise ValueError(f'--spoil={text}: it must be nan:N or huge:N, like nan:3')
    self._scale, self._left = _SCALES[how], int(first)

  def __call__(self, data: bytes) -> bytes:
    self._left -= 1
    if self._left > 0:
      return data
    count = min(_SPOILED_BLOCKS, len(data))
    return bytes([self._scale]) * count + data[count:]


class _SpoilingWork(learner_work.LearnerWork):
  """Spoils the output of the encoder."""

  spoiler: Spoiler

  def _encoded(self, sync: int, fragment: int, data: jax.Array, ok: jax.Array) -> None:
    spoiled = jnp.asarray(np.frombuffer(self.spoiler(np.asarray(data).tobytes()), np.uint8))
    super()._encoded(sync, fragment, spoiled, ok)


def main(argv: list[str]) -> int:
  del argv
  config, values = cli_lib.config(), flags.FLAGS
  work_class = learner_work.LearnerWork
  if values.spoil:
    _SpoilingWork.spoiler, work_class = Spoiler(values.spoil), _SpoilingWork
  where = values.workdir, values.learner, values.syncer
  return nodes.learner(config, *where, cli_lib.access(), work_class)


if __name__ == '__main__':
  cli_lib.define_config()
  cli_lib.define_access()
  for name in ('workdir', 'learner', 'syncer'):
    flags.DEFINE_string(name, None, 'as that of `diloco learner`', required=True)
  flags.DEFINE_string('spoil', '', 'nan:N or huge:N')
  cli_lib.run_main(main)
