"""`diloco aot`: what the TPU compiler says. It runs where the extra [aot] is installed."""

import importlib.util
import os
from unittest import mock

import pytest

from diloco_jax.configs import stdlib_lm
from diloco_jax.launch import aot
from tests.launch.lib.command_line import diloco

HAS_COMPILER = importlib.util.find_spec('libtpu') is not None
compiles = pytest.mark.skipif(not HAS_COMPILER, reason='no libtpu: pip install .[aot]')
PRESETS = [('1b', 'v6e:4x4'), ('4b', 'v6e:8x8'), ('12b', 'v5p:4x4x4')]


def function(name: str, outputs: int, temporaries: int) -> aot.Function:
  return aot.Function(name, 0, outputs, temporaries, 0, {}, 0.0, 0.0)


# --- without a compiler ---------------------------------------------------------------------------


def test_what_fits_is_what_is_held_and_what_the_fullest_function_takes_beside_it():
  arrays = {'parameters': 4 * aot.GIB, 'anchors': 4 * aot.GIB}
  functions = [function('step', 0, 4 * aot.GIB), function('encode', 3 * aot.GIB, 0)]
  said = aot.verdict(16 * aot.GIB, arrays, functions)
  assert said == 'fits: at most 12.00 of 16 GiB while step runs, 75%'


@pytest.mark.parametrize(
  'held, temporaries, named',
  [
    ({'parameters': 9, 'anchors': 18}, 4, 'anchors, 18.00 GiB; use more chips'),
    ({'parameters': 9, 'anchors': 5}, 19, 'temporaries of step, 19.00 GiB; use a smaller data.b'),
    ({'batch': 17}, None, 'batch, 17.00 GiB; use a smaller data.batch_size'),
  ],
)
def test_what_does_not_fit_is_refused_by_the_name_of_its_largest_item(held, temporaries, named):
  arrays = {name: size * aot.GIB for name, size in held.items()}
  functions = [] if temporaries is None else [function('step', 0, temporaries * aot.GIB)]
  with pytest.raises(aot.DoesNotFit, match=f'of 16 GiB.*; the largest item: {named}'):
    aot.verdict(16 * aot.GIB, arrays, functions)


@pytest.mark.parametrize('topology', ['', 'v6e', 'v4:2x2', 'v6e:4', '4x4'], ids=str)
def test_a_wrong_topology_is_one_line_and_42(topology: str):
  done = diloco('aot', f'--topology={topology}', '--config=stdlib_lm:tiny')
  assert (done.returncode, done.stdout) == (42, '')
  assert done.stderr == (
    f'error: --topology is {topology!r}: name one, for example v6e:4x4, v5e:2x4 or v5p:2x2x1\n'
  )


def test_without_the_compiler_it_names_the_package():
  with mock.patch.object(importlib.util, 'find_spec', return_value=None):
    with pytest.raises(ValueError, match=r'-m pip install "libtpu==[\d.]+'):
      aot.prepare()
  if not HAS_COMPILER:
    done = diloco('aot', '--topology=v6e:2x2', '--config=stdlib_lm:tiny')
    assert done.returncode == 42 and 'pip install "libtpu' in done.stderr


# --- with the compiler ----------------------------------------------------------------------------


@pytest.fixture(scope='module')
def compiled() -> tuple[aot.CompiledLearner, dict[str, aot.Function]]:
  """One layer, 512 wide, for four chips."""
  config = stdlib_lm.get_config('tiny')
  config.mesh.data, config.mesh.fsdp = 1, 4
  config.sync.fragments, model = 1, config.model
  model.num_layers, model.embed_dim, model.hidden_dim = 1, 512, 1536
  model.num_heads, model.head_dim = 8, 64
  with mock.patch.dict(os.environ):
    aot.prepare()
    learner = aot.CompiledLearner(config, aot.look_up('v6e:2x2'))
    return learner, {function_.name: function_ for function_ in learner.functions()}


@compiles
def test_each_chip_encodes_and_adopts_what_it_has(compiled):
  learner, functions = compiled
  fragment = 4 * learner.kind.size * len(learner.devices)
  total = 4 * learner.assembled.parameters
  for name in ('encode', 'adopt', 'apply'):
    assert 'all-gather' not in functions[name].collectives
    # Parameters, anchor, base, payload, capture; and the other rows of tensors that are cut.
    assert functions[name].arguments <= 4 * fragment / len(learner.devices)
  assert functions['encode'].temporaries <= fragment / 8
  assert learner.arrays['anchors'] == pytest.approx(total / len(learner.devices), rel=0.02)


@compiles
def test_the_compiler_counts_the_flops_of_the_formula(compiled):
  learner, functions = compiled
  assert functions['step'].flops == pytest.approx(learner.flops, rel=0.1)


@compiles
def test_adopt_is_no_larger_a_program_than_what_it_does(compiled):
  """Of slices at known places the compiler makes ten times the code, in minutes."""
  functions = compiled[1]
  assert functions['adopt'].code <= 3 * functions['encode'].code


@compiles
def test_a_step_that_the_compiler_refuses_is_the_largest_item():
  done = diloco(
    'aot',
    '--topology=v5e:2x2',
    '--config=stdlib_lm:tiny',
    '--config.mesh.fsdp=2',
    f'--config.data.batch_size={1 << 20}',
  )
  assert (done.returncode, done.stdout.count('fits')) == (42, 0)
  assert 'of 16 GiB while step runs; the largest item: temporaries of step, ' in done.stderr


@compiles
def test_a_topology_with_another_number_of_chips_than_the_mesh_is_refused():
  done = diloco('aot', '--topology=v6e:2x2', '--config=stdlib_lm:tiny')
  assert done.returncode == 42
  assert 'the topology has 4 chips and the mesh 2: for example --config.mesh' in done.stderr


@compiles
@pytest.mark.full
@pytest.mark.timeout(3_600)
@pytest.mark.parametrize('variant, topology', PRESETS, ids=str)
def test_the_presets_fit(variant: str, topology: str):
  done = diloco('aot', f'--topology={topology}', f'--config=gemma:{variant}')
  assert done.returncode == 0, done.stderr
  assert int(done.stdout.split()[-1].removesuffix('%')) <= 90
