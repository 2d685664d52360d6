"""A run as a notebook shows it: what it has recorded."""

import html
import pathlib
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from diloco_jax.api import load_params
from diloco_jax.config import run_config
from diloco_jax.protocol import actions
from diloco_jax.report import folder as folder_lib
from diloco_jax.report import live, page
from diloco_jax.report import records as records_lib
from diloco_jax.report import summary as summary_lib

if TYPE_CHECKING:
  from matplotlib import figure as figure_lib

_HEIGHT = 900  # of the page, in pixels


class Curve(NamedTuple):
  """A loss as arrays, one value for each point.

  Attributes:
    clock: of the learner; of an evaluation that of the global model.
    tokens: trained by all learners until then.
    seconds: from the first fact of the run until then.
    loss: as the task computes it; for a decoder in nats for each token.
  """

  clock: np.ndarray
  tokens: np.ndarray
  seconds: np.ndarray
  loss: np.ndarray


class Run:
  """A run in a folder, also one that is under way or was killed: what its records show by now.

  A notebook shows it as the page of `diloco status`. Made by `diloco_jax.run` and `open_run`.

  Attributes:
    workdir, config: its folder, and its config; None: it is not recorded there.
    exits: how each node ended, by its name ('syncer', 'l0', ...); empty if none was started.
  """

  def __init__(self, workdir: str | pathlib.Path, exits: Mapping[str, actions.Exit]):
    self.workdir = pathlib.Path(workdir).absolute()
    self.exits = dict(exits)
    self._size, self._found = -1, folder_lib.read(self.workdir)
    self.config: run_config.Config | None = self._found.config

  def _read(self) -> folder_lib.Read:
    """The records, which are read again only if there are more."""
    size = sum(file.stat().st_size for file in self.workdir.glob(f'{records_lib.RECORDS}/*.jsonl'))
    if size != self._size:
      self._size, self._found = size, folder_lib.read(self.workdir)
    return self._found

  def _state(self) -> dict[str, Any]:
    return summary_lib.state_of(self._read())

  def __repr__(self) -> str:
    name = self.config and self.config.name
    return f'<Run of {name!r} in {self.workdir}: {live.status_line(self._read().run)}>'

  def _repr_html_(self) -> str:
    inner = html.escape(page.inline([self._state()]))
    return (
      f'<iframe srcdoc="{inner}" sandbox="allow-scripts" title="the page of the run" '
      f'style="width: 100%; height: {_HEIGHT}px; border: 0"></iframe>'
    )

  @property
  def params(self) -> Any:
    """The trained model, or that of the newest checkpoint: see `load_params`."""
    return load_params.load_params(self.workdir)

  @property
  def summary(self) -> dict[str, Any]:
    """Losses, tokens, learners, kills, goodput and bytes: what `diloco report` writes as
    summary.json."""
    return summary_lib.summarize(self._read())

  @property
  def evaluations(self) -> Curve:
    """The held-out loss of the global model, or of the learner that trains alone."""
    run = self._read().run
    clock, loss = (
      [getattr(evaluation, what) for evaluation in run.evaluations] for what in ('step', 'loss')
    )
    return _curve(clock, run.evaluated_tokens, run.evaluated_s, loss)

  def loss_at(self, tokens: int) -> float:
    """The held-out loss after so many tokens of all learners. Raises ValueError: none is known."""
    _, known, _, loss = self.evaluations
    if not known.size or not known[0] <= tokens <= known[-1]:
      raise ValueError(f'no evaluation is before and after {tokens:,} tokens')
    return float(np.interp(tokens, known, loss))

  def losses(self, learner: str) -> Curve:
    """The training loss of a learner ('l0', ...), one point for each inner step. Raises KeyError:
    the run has no such learner."""
    learners = self._read().run.learners
    if learner not in learners:
      raise KeyError(f'there is no learner {learner!r}; there are: {", ".join(learners)}')
    steps = list(learners[learner].steps)
    return _curve(*([getattr(s, what) for s in steps] for what in 'step tokens at_s loss'.split()))

  def plot(self) -> 'figure_lib.Figure':
    """The picture of the report: losses against tokens, processes against time."""
    from matplotlib import pyplot  # 1 s

    from diloco_jax.report import picture  # imports matplotlib

    ipython = sys.modules.get('IPython')
    if getattr(ipython and ipython.get_ipython(), 'kernel', None):
      pyplot.switch_backend(pyplot.get_backend())  # it shows figures once that is loaded
    return picture.draw(self._state())


def open_run(workdir: str | pathlib.Path) -> Run:
  """The run in a folder, whoever has started it: `diloco train`, a notebook, a syncer.

  Raises:
    ValueError: there is no run in the folder.
  """
  return Run(workdir, {})


def _curve(*columns: Sequence[float]) -> Curve:
  return Curve(*map(np.array, columns, (int, int, float, float)))
