"""What parameters are worth, an island's own or the global model: held-out loss, text drawn, and a
suite of questions about held-out text, which scores a model in percent."""

import collections
import dataclasses
import itertools
import math
import os.path
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from diloco_jax.train import config as train_config
from diloco_jax.train import mesh as mesh_lib
from diloco_jax.train import task as task_lib
from diloco_jax.train import tokenizer as tokenizer_lib

SUITE_EXAMPLES = 2048
_SEED = 0  # draws the other continuations, and the index of the right one
_BRACKETS = {'(': ')', '[': ']', '{': '}'}
_INDENTED = re.compile(r'\n( *)(\w+|\S)')  # a new line: its spaces, and its first word


def make_eval_step(task: task_lib.Task, mesh: jax.sharding.Mesh, params_shardings: Any) -> Callable:
  """Returns jitted (params, batch) -> mean loss, a float32 scalar."""
  batch_sharding = mesh_lib.batch_sharding(mesh)
  return jax.jit(
    lambda params, batch: task.measured(params, batch, batch_sharding)[0],
    in_shardings=(params_shardings, batch_sharding),
    out_shardings=mesh_lib.replicated(mesh),
  )


def evaluate(
  eval_step: Callable,
  params: Any,
  batches: Sequence[task_lib.Batch],
  stopped: Callable[[], bool] = lambda: False,
) -> float | None:
  """Mean loss over equally large batches; blocks per batch (see island.py). None: there are no
  batches, or `stopped`, which is called before every batch, returned true."""
  if not batches:
    return None
  total = 0.0
  for batch in batches:
    if stopped():
      return None
    total += float(eval_step(params, batch))
  return total / len(batches)


class HeldOut:
  """The held-out batches of a task, on one device; by default the first of this process."""

  def __init__(
    self, task: task_lib.Task, shapes: task_lib.Params, device: jax.Device | None = None
  ):
    mesh = mesh_lib.make_mesh(train_config.MeshConfig(), [device or jax.local_devices()[0]])
    self._shardings = mesh_lib.tree_shardings(mesh, shapes, task.partition)
    self._step = make_eval_step(task, mesh, self._shardings)
    batches = task.eval_batches()
    self._bits_per_byte = bits_per_byte(task, batches)
    self.batches = [mesh_lib.put_batch(mesh, batch) for batch in batches]

  def evaluate(
    self, params: task_lib.Params, stopped: Callable[[], bool] = lambda: False
  ) -> tuple[float, float] | None:
    """The loss, and the bits per byte; None: as `evaluate`."""
    if not self.batches:
      return None
    loss = evaluate(self._step, jax.device_put(params, self._shardings), self.batches, stopped)
    return None if loss is None else (loss, self._bits_per_byte(loss))


def bits_per_byte(
  task: task_lib.Task, batches: Sequence[task_lib.Batch]
) -> Callable[[float], float]:
  """From loss to bits per byte of the text that these batches of the host predict, so that losses
  of two tokenizers can be compared; 0.0 if the task has no tokenizer."""
  if task.tokenizer is None or not batches:
    return lambda loss: 0.0
  targets = [row[1:] for batch in batches for row in np.asarray(batch).tolist()]
  size = sum(map(task.tokenizer().num_bytes, targets))
  return lambda loss: loss / math.log(2) * sum(map(len, targets)) / max(size, 1)


def sample(
  task: task_lib.Task,
  params: Any,
  prompt: Sequence[int],
  length: int,
  temperature: float = 0.8,
  seed: int = 0,
) -> Iterator[int]:
  """Draws one id after the other, without end, each from the `length` ids before it (L of the
  training), the first from at least one of `prompt`. `temperature` divides the logits; 0: the
  likeliest id. The task has `logits` and a tokenizer."""
  size = task.tokenizer().size  # the model may have room for more

  @jax.jit
  def draw(params: Any, window_L: jax.Array, end: jax.Array, key: jax.Array) -> jax.Array:
    logits_V = task.logits(params, window_L[None])[0, end - 1, :size]
    likeliest = jnp.argmax(logits_V)
    drawn = jax.random.categorical(key, logits_V / (temperature or 1.0))
    return drawn if temperature else likeliest

  params, key = jax.device_put(params), jax.random.key(seed)
  ids = list(prompt)
  for index in itertools.count():
    window = ids[-length:]
    window_L = np.zeros(length, np.int32)  # what comes after `end` changes nothing before it
    window_L[: len(window)] = window
    ids.append(int(draw(params, window_L, np.int32(len(window)), jax.random.fold_in(key, index))))
    yield ids[-1]


# --- The suite ------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, kw_only=True)
class Score:
  """How many answers of a model are right, in percent.

  Attributes:
    percent: the mean over the questions.
    error: its standard error in points. All ids of a window are one question, as questions have to
      be independent of each other.
    commonest: of a model that always gives the commonest answer; 0 of questions without choices.
    right_N: 1 for a right answer, 0 for a wrong one; 1/k if k choices are equally likely and one of
      them is right.
  """

  percent: float
  error: float
  commonest: float
  right_N: np.ndarray = dataclasses.field(repr=False, compare=False)


def scores(
  task: task_lib.Task, params: Any, suite: Mapping[str, task_lib.Questions], rows: int = 256
) -> dict[str, Score]:
  """Scores a model of a task, which has `logits`, on questions of every kind. `rows` of them are
  computed at a time."""

  @jax.jit
  def judge(params: Any, inputs: Any, targets_RxL: jax.Array) -> tuple[jax.Array, jax.Array]:
    logits_RxLxV = task.logits(params, inputs).astype(jnp.float32)
    best_RxL = logits_RxLxV.max(axis=-1)
    own_RxL = jnp.take_along_axis(logits_RxLxV, targets_RxL[..., None], axis=-1)[..., 0]
    equal_RxL = (logits_RxLxV == best_RxL[..., None]).sum(axis=-1).astype(jnp.float32)
    likeliest_RxL = (own_RxL == best_RxL).astype(jnp.float32) / equal_RxL
    return own_RxL - jax.nn.logsumexp(logits_RxLxV, axis=-1), likeliest_RxL

  params, by_kind = jax.device_put(params), {}
  for name, questions in suite.items():
    arrays, count = (questions.inputs, questions.targets_RxL), len(questions.targets_RxL)
    parts = []
    for start in range(0, count, rows):
      which = np.arange(start, start + rows) % count  # all parts have one shape
      parts.append(jax.device_get(judge(params, *jax.tree.map(lambda leaf: leaf[which], arrays))))
    by_kind[name] = _score(questions, *(np.concatenate(part)[:count] for part in zip(*parts)))
  return by_kind


def _score(asked: task_lib.Questions, log_p_RxL: np.ndarray, likeliest_RxL: np.ndarray) -> Score:
  counted_RxL, choices = asked.counted_RxL, asked.choices
  if choices == 1:
    right_N = (likeliest_RxL * counted_RxL).sum(axis=1) / counted_RxL.sum(axis=1)
  else:
    sums_NxC = (log_p_RxL * counted_RxL).sum(axis=1).reshape(-1, choices)
    chosen_NxC = sums_NxC == sums_NxC.max(axis=1, keepdims=True)
    right_N = chosen_NxC[np.arange(len(chosen_NxC)), asked.right_N] / chosen_NxC.sum(axis=1)
  commonest = np.bincount(asked.right_N).max() / len(right_N)
  return Score(
    percent=100 * float(right_N.mean()),
    error=100 * float(right_N.std()) / len(right_N) ** 0.5,
    commonest=100 * float(commonest) if choices > 1 else 0.0,
    right_N=right_N,
  )


def multiple_choice(
  rows_NxC: Sequence[Sequence[Sequence[int]]], right_N: Sequence[int], length: int
) -> task_lib.Questions:
  """Questions of rows of at most `length` + 1 ids. Neither the common beginning
  of a question's rows counts nor the ids that fill a row up."""
  choices = len(rows_NxC[0])
  ids_RxL1 = np.zeros((len(rows_NxC) * choices, length + 1), np.int32)
  counted_RxL1 = np.zeros(ids_RxL1.shape, bool)
  for number, rows in enumerate(rows_NxC):
    begin = len(os.path.commonprefix(list(rows)))
    for index, row in enumerate(rows, number * choices):
      ids_RxL1[index, : len(row)] = row
      counted_RxL1[index, begin : len(row)] = True
  return task_lib.Questions(
    inputs=ids_RxL1[:, :-1],
    targets_RxL=ids_RxL1[:, 1:],
    counted_RxL=counted_RxL1[:, 1:],
    right_N=np.asarray(right_N),
    choices=choices,
  )


def text_suite(
  windows: Any, tokenizer: tokenizer_lib.Tokenizer, most: int
) -> dict[str, task_lib.Questions]:
  """Questions about at most `most` of the held-out windows of a text (data.Windows), evenly spread.

  next_token: every id of a window. continuation: which of four second halves of windows follows a
  first half. brackets: which of ) ] } follows, where the opening one is in the window. indentation:
  how far the next line is indented, among the four commonest indentations: its first word is there
  with each of them. A kind that this text or tokenizer does not have is absent. Raises ValueError:
  there is no window.
  """
  if not len(windows):
    raise ValueError(f'there is no held-out text for a suite: {windows} is empty, use more text')
  picked = np.unique(np.linspace(0, len(windows) - 1, min(most, len(windows))).astype(np.int64))
  ids_NxL1 = np.stack([windows[index] for index in picked]).astype(np.int32)
  every = task_lib.Questions(
    inputs=ids_NxL1[:, :-1],
    targets_RxL=ids_NxL1[:, 1:],
    counted_RxL=np.ones(ids_NxL1[:, 1:].shape, bool),
    right_N=np.zeros(len(ids_NxL1), np.int64),
  )
  kinds = {
    'continuation': _continuations(ids_NxL1),
    'brackets': _brackets(ids_NxL1, tokenizer),
    'indentation': _indentations(ids_NxL1, tokenizer),
  }
  length = ids_NxL1.shape[1] - 1
  chosen = {
    name: multiple_choice(*zip(*questions), length)
    for name, questions in kinds.items()
    if questions
  }
  return {'next_token': every, **chosen}


_Asked = list[tuple[list[list[int]], int]]  # the rows of a question, and which is right


def _continuations(ids_NxL1: np.ndarray) -> _Asked:
  half = ids_NxL1.shape[1] - ids_NxL1.shape[1] // 2
  endings_ExK, own_N = np.unique(ids_NxL1[:, half:], axis=0, return_inverse=True)
  if len(endings_ExK) < 4:
    return []
  rng, questions = np.random.default_rng(_SEED), []
  for ids_L1, own in zip(ids_NxL1, own_N.ravel()):
    others = rng.choice(len(endings_ExK) - 1, 3, replace=False)
    right = int(rng.integers(4))
    which = np.insert(others + (others >= own), right, own)
    questions.append(([[*ids_L1[:half], *endings_ExK[ending]] for ending in which], right))
  return questions


def _brackets(ids_NxL1: np.ndarray, tokenizer: tokenizer_lib.Tokenizer) -> _Asked:
  """The last bracket in the second half of each window that closes the last open one of the window.
  In an id of several characters the bracket alone is replaced."""
  closing, questions = list(_BRACKETS.values()), []
  texts = {token_id: tokenizer.decode([token_id]) for token_id in np.unique(ids_NxL1).tolist()}
  for ids in ids_NxL1.tolist():
    open_, last = [], None
    for index, token_id in enumerate(ids):
      for at, char in enumerate(texts[token_id]):
        if char in _BRACKETS:
          open_.append(_BRACKETS[char])
        elif char in closing and open_ and open_.pop() == char and 2 * index >= len(ids):
          last = index, at, closing.index(char), texts[token_id]
    if last:
      index, at, right, text = last
      ends = tokenizer.encode([text[:at] + char + text[at + 1 :] for char in closing])
      if ends[right] == [ids[index]] and index + max(map(len, ends)) <= len(ids):
        questions.append(([[*ids[:index], *end] for end in ends], right))
  return questions


def _indentations(ids_NxL1: np.ndarray, tokenizer: tokenizer_lib.Tokenizer) -> _Asked:
  """The last line that begins in each window, unless too little is left of what precedes it."""
  length, lines = ids_NxL1.shape[1], []
  for ids in ids_NxL1.tolist():
    text = tokenizer.decode(ids)
    begun = list(_INDENTED.finditer(text))
    if begun and '\ufffd' not in text:
      spaces, word = begun[-1].groups()
      lines.append((text[: begun[-1].start()], len(spaces), word))
  known = sorted(dict(collections.Counter(spaces for _, spaces, _ in lines).most_common(4)))
  questions = []
  for before, right, word in lines if len(known) > 1 else ():
    if right in known:
      rows = tokenizer.encode([f'{before}\n{" " * spaces}{word}' for spaces in known])
      cut = max(0, max(map(len, rows)) - length)
      if len(os.path.commonprefix(rows)) - cut >= length // 4:
        questions.append(([row[cut:] for row in rows], known.index(right)))
  return questions
