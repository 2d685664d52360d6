"""The battery of diloco_jax.testing for every merge rule, then the properties of each one."""

import numpy as np
import pytest

from diloco_jax import testing
from diloco_jax.numerics import merge

_SHAPES = {'embed': (16, 4), 'w': (8, 24), 'scale': (5,), 'bias': ()}
_LABELS = {'embed': 'avg', 'w': 'rda', 'scale': 'rda', 'bias': 'avg'}
_RULES = {'avg': merge.avg(), 'rda': merge.rda()}
_MIXED = lambda: merge.by_label(_RULES, list(_LABELS.values()))
_DOUBTING = lambda: merge.by_label({'avg': merge.avg(), 'rda': merge.majority()}, _LABELS.values())

RULES = merge.RULES | {'by_label': _MIXED, 'majority_by_label': _DOUBTING}


_merged = testing.merge_deltas


def _deltas(learners, seed=1):
  rng = np.random.default_rng(seed)
  return {k: rng.standard_normal((learners, *s)) for k, s in _SHAPES.items()}


def _weights(learners, seed=2):
  return np.random.default_rng(seed).uniform(1, 1000, learners)


def _assert_close(a, b, rtol=1e-9):
  assert a.keys() == b.keys()
  for key in a:
    np.testing.assert_allclose(a[key], np.reshape(b[key], -1), rtol=rtol, atol=1e-12)


rules = pytest.mark.parametrize('rule', [make() for make in RULES.values()], ids=RULES.keys())


@rules
def test_every_rule_passes_the_battery(rule):
  testing.check_merge_rule(rule)


def _broken(**change) -> merge.MergeRule:
  return merge.rda()._replace(**change)


@pytest.mark.parametrize(
  'rule, sentence',
  [
    (_broken(stretch=lambda rows, sums_T: 2 * np.ones_like(sums_T)), 'a lone learner merges to'),
    (_broken(stretch=lambda rows, sums_T: np.ones(1)), r'the stretch is \[T\]'),
    (_broken(factors=lambda rows: rows.lengths_MxT[:, :1]), r'factors are \[M, T\]'),
    (_broken(factors=lambda rows: 1024 * rows.lengths_MxT), 'the scale of deltas'),
  ],
)
def test_the_battery_says_what_a_wrong_rule_does_not_hold(rule, sentence):
  with pytest.raises(AssertionError, match=sentence):
    testing.check_merge_rule(rule)


# --- each rule -----------------------------------------------------------------------------------


def test_avg_is_the_weighted_mean():
  deltas, weights = _deltas(4), _weights(4)
  want = {k: np.average(x, axis=0, weights=weights) for k, x in deltas.items()}
  _assert_close(_merged(merge.avg(), deltas, weights), want)


def test_rda_is_the_equation_of_section_4():
  deltas, weights = _deltas(4), _weights(4)
  want = {}
  for k, x in deltas.items():
    v = x.reshape(4, -1)
    norms = np.linalg.norm(v, axis=1, keepdims=True)
    u = np.average(v / norms, axis=0, weights=weights)
    want[k] = np.average(norms[:, 0], weights=weights) * u / np.linalg.norm(u)
  _assert_close(_merged(merge.rda(), deltas, weights), want)


def _rda(v):
  return _merged(merge.rda(), {'v': np.asarray(v)}, np.ones(len(v)))['v']


def test_rda_keeps_the_norm_where_avg_shrinks_it_by_the_root_of_m():
  """Section 4: outer gradients of learners are nearly orthogonal; RDA keeps R for every M."""
  for learners in (2, 4, 16):
    v = np.random.default_rng(learners).standard_normal((learners, 20_000))
    v *= 3.0 / np.linalg.norm(v, axis=1, keepdims=True)
    norm = lambda rule: np.linalg.norm(_merged(rule, {'v': v}, np.ones(learners))['v'])
    assert norm(merge.rda()) == pytest.approx(3.0, rel=1e-9)
    assert norm(merge.avg()) == pytest.approx(3.0 / learners**0.5, rel=0.05)


def test_rda_of_cancelling_learners_goes_to_zero_continuously():
  norm = lambda eps: np.linalg.norm(_rda([[1.0, eps], [-1.0, eps]]))
  assert norm(0.0) == 0.0
  assert norm(1e-4) == pytest.approx(1e-2, rel=1e-3)  # u = 1e-4, divided by the floor 1e-2
  assert norm(1e-2) == pytest.approx(1.0, rel=1e-3)


# --- majority ------------------------------------------------------------------------------------


def _honest(learners, size=20_000, seed=3):
  """Rows as learners send them: nearly orthogonal, with a cosine of about 0.1 with each other."""
  rng = np.random.default_rng(seed)
  return rng.standard_normal(size) * 0.33 + rng.standard_normal((learners, size))


def _majority(v, weights=None):
  return _merged(merge.majority(), {'v': v}, np.ones(len(v)) if weights is None else weights)['v']


def _cosine(a, b):
  return a @ b / np.linalg.norm(a) / np.linalg.norm(b)


def test_majority_is_rda_of_learners_that_agree():
  v = _honest(4)
  v /= np.linalg.norm(v, axis=1, keepdims=True)
  _assert_close({'v': _majority(v)}, {'v': _rda(v)})


@pytest.mark.parametrize('scale', [1.0, 8.0])
@pytest.mark.parametrize('learners, liars', [(3, 1), (4, 1), (5, 2), (7, 3)])
def test_fewer_than_half_flipped_rows_change_neither_direction_nor_length(learners, liars, scale):
  v = _honest(learners)
  v[:liars] *= -scale
  alone = _rda(v[liars:])
  assert _cosine(_majority(v), alone) == pytest.approx(1, abs=1e-9)
  assert np.linalg.norm(_majority(v)) == pytest.approx(np.linalg.norm(alone), rel=0.02)
  assert _cosine(_rda(v), alone) < 0.95


@pytest.mark.parametrize('same', [True, False], ids=['one payload', 'payloads of their own'])
@pytest.mark.parametrize('learners', [2, 4, 6])
def test_between_halves_that_point_apart_the_tensor_stands_still(learners, same):
  v = _honest(learners)
  v[::2] *= -1
  if same:
    v[::2] = v[0]
  assert not _majority(v).any()
  assert np.linalg.norm(_rda(v)) > 100


def test_a_trusted_row_that_is_long_counts_with_the_median_length():
  v = _honest(3)
  usual = np.linalg.norm(_majority(v))
  v[0] *= 8
  assert np.linalg.norm(_majority(v)) == pytest.approx(usual, rel=0.02)


def test_the_outer_gradient_goes_to_zero_with_the_agreement():
  lengths = []
  for angle in (1e-1, 1e-2, 1e-3, 0.0):  # of cosine about `angle`, between two learners
    lengths.append(np.linalg.norm(_majority(np.array([[1.0, 0.0], [angle, 1.0]]))))
  assert lengths[0] == pytest.approx(1, rel=0.01)
  np.testing.assert_allclose(lengths[1:], [0.4, 0.04, 0.0], rtol=0.01)


def test_a_row_of_zeros_has_no_vote():
  v = _honest(3)
  with_zeros = np.stack([*v, np.zeros_like(v[0])])
  assert _cosine(_majority(with_zeros), _majority(v)) == pytest.approx(1, abs=1e-9)


@pytest.mark.parametrize('present', [[0], [0, 1], [0, 1, 2], [2], [0, 2], [0, 2, 3]], ids=str)
def test_half_of_the_learners_never_move_the_tensor_alone(present):
  """Two of four learners lie; fewer rows than learners come to the outer step."""
  v = _honest(4)
  v[:2] *= -1
  rows = {'v': v[present]}
  assert not _merged(merge.majority(learners=4), rows, np.ones(len(present)))['v'].any()


def test_a_majority_of_the_learners_moves_the_tensor_without_the_others():
  v = _honest(3)
  merged = _merged(merge.majority(learners=4), {'v': v}, np.ones(3))['v']
  assert _cosine(merged, _rda(v)) == pytest.approx(1, abs=1e-9)
  flipped = np.stack([v[0], v[1], -v[2]])
  merged = _merged(merge.majority(learners=3), {'v': flipped}, np.ones(3))['v']
  assert _cosine(merged, _rda(v[:2])) == pytest.approx(1, abs=1e-9)


# --- by label ------------------------------------------------------------------------------------


def test_by_label_applies_each_rule_to_its_tensors():
  deltas, weights = _deltas(3), _weights(3)
  mixed = _merged(_MIXED(), deltas, weights)
  for k, label in _LABELS.items():
    alone = _merged(_RULES[label], {k: deltas[k]}, weights)
    np.testing.assert_allclose(mixed[k], alone[k], rtol=1e-12)


def test_by_label_names_what_is_missing():
  with pytest.raises(ValueError, match=r"no rule for labels \['rda'\]; rules are given for \['avg"):
    merge.by_label({'avg': merge.avg()}, _LABELS.values())


# --- weights -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  'tokens, steps, weights',
  [
    ([1000, 1000, 500], [10, 20, 10], [1.0, 0.5, 0.25]),
    ([0, 5, 0, 7], [0, 0, 3, 7], [0.0, 0.0, 0.0, 1.0]),
    ([0, 0], [0, 0], [0.0, 0.0]),
    ([8_000_000, 400, 400, 400], [80_000, 4, 4, 4], [1, 1 / 3, 1 / 3, 1 / 3]),  # M - 1 medians
    *(([many, many // 2], [8, 4], [1.0, 0.5]) for many in (2**31, 2**53, 2**62)),
  ],
)
def test_weights_are_quantity_times_quality(tokens, steps, weights):
  """Section 4: w = c_tokens * (c_tokens / c_steps); who is absent weighs nothing."""
  found_M = merge.token_weights(tokens, steps)
  assert found_M.dtype == np.float32 and found_M.tolist() == np.float32(weights).tolist()


@rules
def test_the_mean_cosine_is_that_of_all_pairs_by_what_they_weigh(rule):
  deltas, shares = _deltas(5), merge.shares(_weights(5))
  deltas['alone'] = np.eye(5)[0, :, None] * [3.0, 4.0]  # all but one row are zero
  lengths_MxT = np.stack([np.linalg.norm(x.reshape(5, -1), axis=1) for x in deltas.values()], 1)
  ones = np.ones((5, 5, len(deltas)))  # for a rule that asks: it trusts all rows
  parts_MxT = lengths_MxT * rule.factors(merge.Rows(shares, lengths_MxT, ones))
  sums, expected = [], []
  for x, r, part in zip(deltas.values(), lengths_MxT.T, parts_MxT.T, strict=True):
    units = x.reshape(5, -1) / np.where(r > 0, r, 1)[:, None]
    sums.append(np.linalg.norm(part @ units))
    weights = np.outer(part, part) * (1 - np.eye(5))
    expected.append(np.sum(weights * (units @ units.T)) / max(weights.sum(), 1e-9))
  cosines = merge.mean_cosines(parts_MxT, np.array(sums), list(deltas))
  assert cosines == pytest.approx(dict(zip(list(deltas)[:-1], expected)), rel=1e-6)
