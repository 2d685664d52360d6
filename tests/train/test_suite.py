"""The suite: its questions, and the scores of models whose answers are known."""

import dataclasses
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from diloco_jax.train import config as train_config
from diloco_jax.train import data as data_lib
from diloco_jax.train import decoder, evaluate
from diloco_jax.train import tokenizer as tokenizer_lib

L, N = 64, 40
OPEN, CLOSED, DEEP = '([{', ')]}', (0, 2, 4, 6)


def _window(number: int) -> str:
  """Begins with an indented line; ends with a bracket that closes the last open one."""
  deep, kind = DEEP[number % 4], number % 3
  text = f'n{number:02d}, the first line\n{" " * deep}w{number:02d} = {OPEN[kind]}'
  filled = f'{number * 7919 % 10**9:x}'.rjust(L - len(text), '.')
  return f'{text}{filled}{CLOSED[kind]}'


@pytest.fixture(scope='module', name='windows_NxL1')
def _windows() -> np.ndarray:
  return np.array([list(_window(number).encode()) for number in range(N)], np.uint8)


@pytest.fixture(scope='module', name='task')
def _task():
  return decoder.task(train_config.ModelConfig(num_layers=1), train_config.DataConfig(seq_len=L))


def _knows(truth_NxL1: jax.Array, ids_BxL: jax.Array) -> jax.Array:
  """Logits of a model that finds the window which a row begins with, and continues with that."""
  same_BxN = (ids_BxL[:, None, :12] == truth_NxL1[None, :, :12]).sum(axis=-1)
  return 30 * jax.nn.one_hot(truth_NxL1[same_BxN.argmax(axis=-1)][:, 1:], 256)


def _uniform(params, ids_BxL: jax.Array) -> jax.Array:
  return jnp.zeros((*ids_BxL.shape, 256))


@pytest.mark.full
def test_a_model_that_knows_the_text_is_right_and_a_uniform_one_guesses(task, windows_NxL1):
  suite = evaluate.text_suite(windows_NxL1, tokenizer_lib.Tokenizer(), N)
  truth = windows_NxL1.astype(np.int32)
  for rows in (16, 7):  # the last part is filled up
    knows = evaluate.scores(dataclasses.replace(task, logits=_knows), truth, suite, rows)
    right = {name: (score.percent, score.error) for name, score in knows.items()}
    assert right == dict.fromkeys(suite, (100, 0))
  uniform = evaluate.scores(dataclasses.replace(task, logits=_uniform), None, suite)
  assert uniform['next_token'].percent == pytest.approx(100 / 256)
  assert (uniform['continuation'].percent, uniform['continuation'].error) == (25, 0)
  assert uniform['brackets'].percent == pytest.approx(100 / 3)
  assert uniform['indentation'].percent == 25  # the least spaces are always the most probable


def test_the_questions_are_what_they_say(windows_NxL1):
  suite = evaluate.text_suite(windows_NxL1, tokenizer_lib.Tokenizer(), N)
  assert [len(questions.right_N) for questions in suite.values()] == [N] * 4
  texts = {_window(number) for number in range(N)}
  for name in ('continuation', 'brackets', 'indentation'):
    questions = suite[name]
    ids_RxL1 = np.concatenate([questions.inputs[:, :1], questions.targets_RxL], axis=1)
    rows = [bytes(ids.tolist()).rstrip(b'\0').decode() for ids in ids_RxL1]
    for number, right in enumerate(questions.right_N):
      asked = rows[number * questions.choices : (number + 1) * questions.choices]
      assert len(set(asked)) == questions.choices
      known = [any(text.startswith(row) for text in texts) for row in asked]
      assert known == [place == right for place in range(questions.choices)]
      row = number * questions.choices + right
      counted_ids = questions.targets_RxL[row][questions.counted_RxL[row]]
      counted = bytes(counted_ids.tolist()).decode()
      if name == 'brackets':
        assert counted == CLOSED[number % 3]
      elif name == 'indentation':
        assert len(re.sub(r'w\d\d|\d\d', '', counted)) <= max(DEEP)


def test_the_error_is_the_binomial_one_and_ids_of_a_window_are_one_question(task, windows_NxL1):
  """A model that knows every fourth window alone."""
  suite = evaluate.text_suite(windows_NxL1, tokenizer_lib.Tokenizer(), N)
  known = jnp.asarray(windows_NxL1.astype(np.int32))

  def logits(params, ids_BxL):
    some_B = (params[None] == ids_BxL[:, None, :12]).all(axis=-1).any(axis=-1)
    return jnp.where(some_B[:, None, None], _knows(known, ids_BxL), _uniform(None, ids_BxL))

  model = dataclasses.replace(task, logits=logits)
  scores = evaluate.scores(model, known[::4, :12], suite)
  share = 0.25 + 0.75 / 256
  assert scores['next_token'].percent == pytest.approx(100 * share)
  spread = (1 - 1 / 256) * (0.25 * 0.75) ** 0.5  # of the windows' means
  assert scores['next_token'].error == pytest.approx(100 * spread / N**0.5)
  right_N = scores['continuation'].right_N
  assert set(right_N) == {0.25, 1.0} and scores['continuation'].percent == 100 * right_N.mean()


def test_the_suite_is_the_same_again_and_of_held_out_documents_alone(tmp_path):
  for number in range(200):
    name = f'q{number:03d}z'
    lines = (f'  {name} = [call({name})]\n{" " * (line % 4)}{name}\n' for line in range(30))
    (tmp_path / f'{number}.py').write_text(''.join(lines))
  corpus = data_lib.load_corpus(str(tmp_path))
  names = lambda ids: set(re.findall(rb'q\d{3}z', bytes(ids)))
  trained, held_out = names(corpus.train_ids), names(corpus.eval_ids)
  assert trained and held_out and not trained & held_out
  data = train_config.DataConfig(seq_len=L, corpus=str(tmp_path))
  task = decoder.task(train_config.ModelConfig(num_layers=1), data)
  suite, again = task.suite(50), task.suite(50)
  assert list(suite) == ['next_token', 'continuation', 'brackets', 'indentation']
  for name, questions in suite.items():
    assert 3 < len(questions.right_N) <= 50
    for field in dataclasses.fields(questions):
      value = getattr(again[name], field.name)
      np.testing.assert_array_equal(getattr(questions, field.name), value)
    asked = set()
    # Only the right rows: what was joined to ask may look like a name.
    for number, right in enumerate(questions.right_N):
      asked |= names(questions.inputs[number * questions.choices + right].tolist())
    assert asked and asked <= held_out


def test_what_a_text_does_not_have_is_not_asked():
  with pytest.raises(ValueError, match=r'no held-out text .*Windows\(length=64, count=0\)'):
    evaluate.text_suite(data_lib.Windows(np.zeros(L, np.uint8), L), tokenizer_lib.Tokenizer(), 9)
  windows_NxL1 = np.full((5, L + 1), ord('a'), np.uint8)
  suite = evaluate.text_suite(windows_NxL1, tokenizer_lib.Tokenizer(), 9)
  assert list(suite) == ['next_token'] and len(suite['next_token'].right_N) == 5
