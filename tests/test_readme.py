"""The commands of the README work as written."""

import dataclasses
import pathlib
import re
import tomllib

import jax

import diloco_jax
from diloco_jax import __main__
from diloco_jax.configs import own_loop
from tests.runs.lib import examples

ROOT = pathlib.Path(__file__).resolve().parents[1]
README = (ROOT / 'README.md').read_text()


def test_the_loop_of_the_readme_learns():
  (loop,) = re.findall(r'```python\n(.*?)\n```', README, re.S)
  own = examples.load('loop_optax')
  params = own.init()
  page = {
    'init': lambda: (params, own.TX.init(params)),
    'read': own.read,
    'step': lambda params, opt_state, batch: own.step(params, opt_state, batch, 5e-3),
  }
  with jax.numpy_dtype_promotion('standard'), jax.numpy_rank_promotion('allow'):
    sync = dataclasses.replace(own_loop.get_config().sync, learners=1)
    with diloco_jax.run_syncer(total_steps=300, sync=sync) as server:
      exec(compile(loop, 'README.md', 'exec'), page | {'address': server.address})
      merged = server.wait(60)
    assert merged.keys() == params.keys()
    assert float(own.step(merged, own.TX.init(params), own.read(9, 0), 0.0)[2]) < 1.5  # ln 64: 4.2


def test_files_that_the_readme_names_exist():
  for target in re.findall(r'\]\((?!https?:|#)([^)#]+)\)', README):
    assert (ROOT / target).exists(), target
  commands = re.findall(r'^    diloco (\w+)', README, re.M)
  assert commands and set(commands) <= {'completion', *__main__.COMMANDS}


def test_the_address_to_clone_is_that_of_the_package():
  urls = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']['urls']
  assert f'git clone {urls["Source"]} ' in README


def test_no_placeholder_is_left():
  assert not re.search(r'@[A-Z]+@', README)
