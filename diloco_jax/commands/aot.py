"""Compiles a config for a TPU slice on a machine without TPUs, and says whether it fits.

    diloco aot --topology=v6e:4x4 --config=experiments/configs/v5p_v6e.py --config.mesh.fsdp=16

Compiled are the inner step and, for the largest fragment, encode, adopt and apply. For each the
program prints what it takes of a chip's memory, FLOPs as the compiler counts them (the body of a
scan once, no Pallas kernel) and collectives. Needs the extra [aot]. Exit codes: 0 it fits, 42 it
does not (the largest item is named), or there is no such topology.
"""

from absl import flags

from diloco_jax.launch import aot, cli
from diloco_jax.process import exits

cli.define_config(without='')
_TOPOLOGY = flags.DEFINE_string(
  'topology', '', 'The chips of one slice, as v5e:2x4 or v5p:2x2x1: as many as the mesh has.'
)
_MIB = 1 << 20


def main(argv: list[str]) -> None:
  del argv
  with exits.never_retry(ValueError, aot.DoesNotFit):
    hbm = aot.HBM[aot.chip(_TOPOLOGY.value)]
    config = cli.config()
    aot.prepare()
    learner = aot.CompiledLearner(config, aot.look_up(_TOPOLOGY.value))
    print(_header(learner, config.name, hbm), flush=True)
    arrays, functions = learner.arrays, []
    aot.verdict(hbm, arrays, functions)
    print(f'{"":13}{"argum.":>10}{"outputs":>10}{"tempor.":>10}{"peak":>10}{"code":>8}  MiB')
    for function in learner.functions():
      functions.append(function)
      print(_line(arrays, function), flush=True)
    print(aot.verdict(hbm, arrays, functions))


def _header(learner: aot.CompiledLearner, name: str, hbm: int) -> str:
  assembled, device = learner.assembled, learner.devices[0]
  held = ', '.join(f'{group} {size / _MIB:.1f}' for group, size in learner.arrays.items())
  return (
    f'{name}: {assembled.parameters:,} parameters in {assembled.layout.num_fragments} fragments\n'
    f'{_TOPOLOGY.value}: {len(learner.devices)} chips ({device.device_kind}) of '
    f'{hbm / aot.GIB:.0f} GiB\n'
    f'a chip holds, MiB: {held}\n'
    f'the largest fragment has {learner.kind.size:,} values on a chip'
    + (f'; a step takes {learner.flops:.3g} FLOPs by formula' if learner.flops else '')
  )


def _line(arrays: dict[str, int], function: aot.Function) -> str:
  sizes = function.arguments, function.outputs, function.temporaries, aot.peak(arrays, function)
  collectives = ', '.join(f'{count} {name}' for name, count in function.collectives.items())
  return (
    f'{function.name:13}'
    + ''.join(f'{size / _MIB:10.1f}' for size in sizes)
    + f'{function.code / _MIB:8.1f}  {function.flops:.3g} FLOPs; {collectives or "no collective"}; '
    f'compiled in {function.cpu_s:.0f} CPU-s'
  )
