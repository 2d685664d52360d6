"""The figures of experiments/studies/experts.py, and its mean of routers."""

import jax
import numpy as np
import pytest

from diloco_jax.config import build
from diloco_jax.configs import stdlib_lm
from diloco_jax.numerics import fragments
from diloco_jax.verification.virtual import arrays
from experiments.studies import experts
from experiments.studies.lib import arms


@pytest.fixture(name='learners', scope='module')
def _learners():
  """Two that have trained apart for a step."""
  arms.get_ready()
  config = stdlib_lm.get_config('moe')
  config.model.num_experts, config.model.num_layers = experts.EXPERTS, 1
  config.sync.fragmentation = 'balanced'
  first = arrays.fresh_island(build.assemble(config))
  learners = [first, first.twin()]
  for shard, learner in enumerate(learners):
    learner.read_from(shard)
    learner.step(0)
  return config.model, learners


def test_the_routers_become_one_and_nothing_else_changes(learners):
  _, learners = learners
  before = [jax.device_get(fragments.by_path(one.params)) for one in learners]
  experts.average_routers(learners)
  after = [jax.device_get(fragments.by_path(one.params)) for one in learners]
  for path, leaf in after[0].items():
    own, other = (one[path] for one in before)
    same = np.array_equal(leaf, after[1][path])
    if path.endswith('/router'):
      assert same and not np.array_equal(own, other)
      np.testing.assert_allclose(leaf, (own + other) / 2, atol=1e-6)
    else:
      np.testing.assert_array_equal(leaf, own)


def test_the_choices_are_those_of_the_model(learners, capsys):
  model, learners = learners
  tokens = np.random.default_rng(0).integers(0, 256, (4, 32))
  found = [experts.choices(model, one.params, tokens) for one in learners]
  probabilities_BxLxE, chosen_BxLxC = found[0][0]
  np.testing.assert_allclose(probabilities_BxLxE.sum(axis=-1), 1, rtol=1e-5)
  chances = np.take_along_axis(np.asarray(probabilities_BxLxE), np.asarray(chosen_BxLxC), -1)
  assert chances.min(axis=-1).tolist() == np.sort(probabilities_BxLxE)[..., -2].tolist()
  experts.show('same', 1.0, 2.0, [learners[0]] * 2, [found[0]] * 2)
  _, _, share, loss, overlap, distance, *entropies, _ = capsys.readouterr().out.split('|')
  assert [float(one) for one in (share, loss, overlap, distance)] == [1.0, 2.0, 1.0, 0.0]
  assert all(0 < float(one) <= 1 for one in entropies)
  assert experts.entropy(np.full((3, experts.EXPERTS), 1 / experts.EXPERTS)) == pytest.approx(1)
