"""One cell: its processes start over links that are not shaped and train for a while; then they
wait, the links are shaped and checked, and the steps are measured."""

import json
import multiprocessing
import os
import pathlib
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing import connection
from typing import Any

from diloco_jax.config import run_config
from diloco_jax.protocol import actions, facts
from diloco_jax.verification.checks import judge_tapes
from diloco_jax.verification.virtual import links
from experiments.goodput import measured
from experiments.links import cells, programs, shaped
from scripts.benchmarks import outer_round

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAMS = pathlib.Path(programs.__file__)
WARM_PERIODS = 1
END_S = 180.0  # for the payloads on their way, and the processes, to end
SETTLE_S = 1.0  # after the last step of the warm-up, for what is on its way
ENVIRONMENT = {
  'JAX_PLATFORMS': 'cpu',
  'XLA_FLAGS': '--xla_cpu_multi_thread_eigen=false intra_op_parallelism_threads=1',
  'GLOO_SOCKET_IFNAME': 'cable',
  'RUST_LOG': 'error',  # torchft prints 20 lines a round
}

Row = dict[str, Any]


def measure(cell: cells.Cell, links: shaped.Links, torch_python: str) -> Row:
  """Runs a cell; its row.

  Raises:
    WrongRate: the links do not have their rate.
    RuntimeError, TimeoutError: a process has ended, or has not come to a barrier; its output.
  """
  began_s = time.monotonic()
  links.shape(0)
  with tempfile.TemporaryDirectory(prefix='diloco-') as folder:
    run = _Run(cell, links, pathlib.Path(folder), torch_python)
    try:
      row = run.measure()
    except Exception as error:
      error.add_note(run.outputs())
      raise
    finally:
      run.close()
  return row | {'seconds': time.monotonic() - began_s, 'load': os.getloadavg()[0]}


class _Run:
  """The processes of a cell."""

  def __init__(
    self, cell: cells.Cell, links: shaped.Links, folder: pathlib.Path, torch_python: str
  ):
    self._cell, self._links, self._folder = cell, links, folder
    self._method = cells.METHODS[cell.method]
    self._python = torch_python if self._method.program == cells.TORCHFT else sys.executable
    self._processes: dict[str, subprocess.Popen] = {}
    self._pipes: list[connection.Connection] = []
    self._address = f'{links.address(shaped.SYNCER)}:{shaped.PORT}'
    # Barriers after the warm-up: one for all steps, or one for each exchange.
    self._barriers = 1

  def measure(self) -> Row:
    self._start()
    first = [done for done, _ in self._meet()]
    time.sleep(SETTLE_S)
    self._links.shape(self._cell.mbit)
    checked = self._links.check(self._cell.mbit)
    before = self._links.counters()
    since_ns = time.monotonic_ns()
    self._answer()  # beforehand, so that no process waits at its last barrier
    for _ in range(self._barriers):
      self._answer()
      last = self._meet()
    after = self._links.counters()
    steps = [done - was for (done, _), was in zip(last, first)]
    if self._method.program == cells.TORCHFT:  # its barriers carry other figures
      steps = [self._cell.steps] * len(last)
    seconds = [ended_s - since_ns / 1e9 for _, ended_s in last]
    shares = [count * cells.FLOOR_S / one for count, one in zip(steps, seconds)]
    bytes_up, bytes_down = (
      [getattr(after[name], way) - getattr(before[name], way) for name in before]
      for way in ('up', 'down')
    )
    row = {
      'key': self._cell.key,
      'method': self._cell.method,
      'mbit': self._cell.mbit,
      'steps': sum(steps) / len(steps),
      'period': self._method.period,
      'floor_s': cells.FLOOR_S,
      'learners': len(before),
      'sync': self._method.sync,
      'checked_mbit': checked,
      'measured_s': sum(seconds) / len(seconds),
      'computes': sum(shares) / len(shares),
      'computes_least': min(shares),
      'bytes_up': sum(bytes_up) / len(bytes_up) / self._cell.steps,
      'bytes_down': sum(bytes_down) / len(bytes_down) / self._cell.steps,
    }
    if self._method.program == cells.TASK:
      self._end()
      until_ns = round(max(ended_s for _, ended_s in last) * 1e9)
      node_tapes = measured.node_tapes(self._folder / 'run')
      row |= merged(node_tapes, since_ns, until_ns, sum(steps))
    return row

  def _start(self) -> None:
    {
      cells.TASK: self._start_own_loop,
      cells.DATA_PARALLEL: self._start_data_parallel,
      cells.TORCHFT: self._start_torchft,
    }[self._method.program]()

  def _start_own_loop(self) -> None:
    warm, steps = WARM_PERIODS * self._method.period, self._cell.steps
    certificates(self._folder, self._links.learners)
    settings = [f'--config.sync.{name}={value}' for name, value in self._method.sync.items()]
    self._spawn(
      shaped.SYNCER,
      ['-m', 'diloco_jax', 'syncer', '--config=own_loop', *settings]
      + [f'--config.train.steps={warm + steps + programs.TAIL}', f'--workdir={self._folder}/run']
      + [f'--listen={self._address}', f'--tls={self._folder}/certs/{shaped.SYNCER}'],
    )
    for index, name in enumerate(self._links.learners):
      self._spawn(
        name,
        [str(PROGRAMS), '--way=own_loop', f'--index={index}', f'--address={self._address}']
        + [f'--settings={json.dumps(self._method.sync)}', f'--tls={self._folder}/certs/{name}']
        + [f'--warm={warm}', f'--steps={steps}', f'--floor_s={cells.FLOOR_S}'],
        barriers=True,
      )

  def _start_data_parallel(self) -> None:
    self._barriers = self._cell.steps
    address = f'{self._links.address(self._links.learners[0])}:{shaped.PORT}'
    for index, name in enumerate(self._links.learners):
      self._spawn(
        name,
        [str(PROGRAMS), '--way=data_parallel', f'--index={index}', f'--address={address}']
        + [f'--learners={len(self._links.learners)}', '--warm=1']
        + [f'--steps={self._cell.steps}', f'--floor_s={cells.FLOOR_S}'],
        barriers=True,
      )

  def _start_torchft(self) -> None:
    self._barriers = self._cell.steps // self._method.period
    file = str(outer_round.TORCH_PEERS)
    self._spawn(shaped.SYNCER, [file, '--way=serve_torchft', f'--address={self._address}'])
    for index, name in enumerate(self._links.learners):
      self._spawn(
        name,
        [file, '--way=torchft', '--variant=1', f'--index={index}', f'--address={self._address}']
        + [f'--host={self._links.address(name)}', '--warm=1', f'--rounds={1 + self._barriers}']
        + [f'--period={self._method.period}', f'--floor_s={cells.FLOOR_S}'],
        barriers=True,
      )

  def _spawn(self, node: str, words: Sequence[str], barriers: bool = False) -> None:
    passed = ()
    if barriers:
      mine, theirs = multiprocessing.Pipe()
      words, passed = [*words, f'--pipe={theirs.fileno()}'], (theirs.fileno(),)
      self._pipes.append(mine)
    with open(self._folder / f'{node}.log', 'wb') as log:
      self._processes[node] = self._links.start(
        node,
        [self._python, *words],
        cwd=ROOT,
        env=os.environ | ENVIRONMENT | {'PYTHONPATH': str(ROOT)},
        stdin=subprocess.PIPE,
        stdout=log,
        stderr=subprocess.STDOUT,
        pass_fds=passed,
      )
    if barriers:
      theirs.close()

  def _meet(self) -> list[tuple[float, float]]:
    """The steps of each learner at its next barrier, and when it came there."""
    try:
      return [one.recv() for one in self._at_barrier()]
    except EOFError:
      raise RuntimeError(f'{self._cell.name}: a process has ended') from None

  def _at_barrier(self) -> Iterator[connection.Connection]:
    for one in self._pipes:
      if not one.poll(outer_round.DEADLINE_S):
        limit_s = outer_round.DEADLINE_S
        raise TimeoutError(f'{self._cell.name}: a process came to no barrier within {limit_s} s')
      yield one

  def _answer(self) -> None:
    for one in self._pipes:
      one.send(None)

  def _end(self) -> None:
    """Waits for the end of the run."""
    for name, one in self._processes.items():
      if code := one.wait(END_S):
        raise RuntimeError(f'{self._cell.name}: {name} ended with {code}')

  def outputs(self) -> str:
    """The end of what each process has printed."""
    return '\n'.join(
      f'--- {path.stem}\n{path.read_text("utf-8", "replace")[-1500:]}'
      for path in sorted(self._folder.glob('*.log'))
    )

  def close(self) -> None:
    for one in self._processes.values():
      one.kill()
      one.communicate()
    for one in self._pipes:
      one.close()


def certificates(folder: pathlib.Path, learners: Sequence[str]) -> None:
  """FOLDER/certs: those of a syncer and of the learners."""
  command = [sys.executable, '-m', 'diloco_jax', 'certs', f'--tls={folder}/certs']
  for words in (['init', '--name=bench'], ['issue', *learners]):
    subprocess.run([*command, *words], check=True, cwd=ROOT, stdout=subprocess.DEVNULL)


def merged(node_tapes: Sequence[judge_tapes.Tape], since_ns: int, until_ns: int, steps: int) -> Row:
  """Of the tokens that were not merged at `since_ns`: the share that was merged by the end of the
  run. Of those of the syncs that opened by `until_ns`, in which the learners made so many `steps`
  together: the share merged in the sync for which they were due. Of the payloads merged: the share
  of the codec for slow links.

  Each token counts once for each fragment, as in the syncer's ledger."""
  counts = links.Counts()
  before = due = 0.0
  ledger, names = None, []
  opened: set[int] = set()
  for node_tape, _, turn, _ in judge_tapes.in_order(node_tapes):
    if node_tape.start.role != 'syncer':
      continue
    names = names or run_config.learner_ids(node_tape.start.config.learners)
    out = getattr(turn, 'actions', ())
    already = counts.on_time.total()
    counts.take(out, names)
    for action in out:
      match action:
        case actions.Report(fact=facts.Opened(sync=sync)) if since_ns < turn.now_ns <= until_ns:
          opened.add(sync)
        case actions.Report(fact=facts.Ledger() as ledger):
          pass
        case actions.Merge(sync=sync):
          if turn.now_ns < since_ns:
            before = counts.merged.total()
          if sync in opened:
            due, already = due + counts.on_time.total() - already, counts.on_time.total()
  if ledger is None:
    raise RuntimeError('there is no ledger on the tape of the syncer')
  return {
    'merged': (counts.merged.total() - before) / (ledger.fragments * ledger.trained - before),
    'on_time': due / (ledger.fragments * programs.TOKENS * steps),
    'discarded': ledger.discarded,
    'fragments': ledger.fragments,
  }
