"""Specs of a config: valid ones are parsed, wrong ones are refused with the valid choices."""

import numpy as np
import pytest

from diloco_jax.numerics import merge, outer, spec


@pytest.mark.parametrize(
  'text, want',
  [
    ('avg', ('avg', {})),
    ('avg()', ('avg', {})),
    (' rda(floor=-2e-2) ', ('rda', {'floor': -0.02})),
    ("x(a=1, b='c', d=None)", ('x', {'a': 1, 'b': 'c', 'd': None})),
  ],
)
def test_a_spec_is_a_name_with_keyword_arguments(text, want):
  assert spec.parse(text) == want


@pytest.mark.parametrize(
  'text', ['', 'rda(', 'rda(0.02)', 'rda(floor=x)', 'rda(**{})', 'a.b', '1', 'rda()()', 'a\nb']
)
def test_anything_else_is_refused(text):
  with pytest.raises(ValueError, match='is neither a name nor a name with keyword arguments'):
    spec.parse(text)


@pytest.mark.parametrize(
  'text',
  ['-' * 100_000 + '1', 'a' + '.a' * 50_000, f'x(a={"-" * 990}1)', f'x(a={"(" * 490}1{")" * 490})'],
)
def test_a_spec_that_is_too_long_or_too_deep_is_refused(text):
  with pytest.raises(ValueError, match='with keyword arguments, such as') as caught:
    outer.make(text)
  assert len(str(caught.value)) < 1_200


@pytest.mark.parametrize(
  'make, text, words',
  [
    (merge.make, 'mean', "'mean' is unknown; use one of: avg, majority"),
    (
      merge.make,
      'rda(flor=1)',
      "unexpected keyword argument 'flor'; it is rda(floor: float = 0.01)",
    ),
    (merge.make, "rda(floor='x')", 'not supported between'),
    (merge.make, 'rda(floor=0.0)', 'floor must be above 0'),
    (merge.make, 'rda(floor=-0.1)', 'floor must be above 0'),
    (merge.make, 'majority(agree=0)', 'agree must be above 0'),
    (merge.make, 'majority(floor=2)', 'floor must be above 0'),
    (merge.make, 'majority(learners=-1)', 'learners must be a whole number'),
    (outer.make, 'sdg', 'use one of: adabelief'),
    (outer.make, 'clip(max_delta=1.0)', "'clip' is unknown"),  # of optax, but it does not descend
    (outer.make, 'adam', "missing 1 required positional argument: 'learning_rate'; it is adam("),
    (outer.make, 'lbfgs', "missing 3 required keyword-only arguments: 'value'"),
    (outer.make, 'nesterov(learning_rate=-1)', 'learning_rate must be in (0, 10]'),
    (outer.make, f'adam(learning_rate=1{"0" * 400})', 'it is adam('),
    (outer.make, "nesterov(momentum='x')", 'not supported between'),
    (outer.make, 'rmsprop(learning_rate=0.1, eps=0.0)', 'a gradient of zeros is not finite'),
  ],
)
def test_a_wrong_spec_is_refused_in_one_line_with_the_choices(make, text, words):
  with pytest.raises(ValueError) as caught:
    make(text)
  assert words in str(caught.value) and '\n' not in str(caught.value)


def test_arguments_arrive():
  rows, half_T = merge.Rows(np.full(2, 0.5), np.ones((2, 1))), np.full(1, 0.5)
  assert merge.make('rda(floor=1.0)').stretch(rows, half_T) == [1.0]
  assert merge.make('rda').stretch(rows, half_T) == [2.0]
