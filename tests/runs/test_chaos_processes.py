"""Real processes under a chaos plan: eight faults in one run, checked on its tapes and records.

One run serves all tests, since starting processes costs most of the time: l0 is untouched, l1 and
l2 get four faults each, one after the other. The conductor of the plan waits for facts (the fault
had its effect, the others continued, the victim recovered), so no test depends on the speed of the
machine. The tests then read the records of the processes, and the judge reads their tapes.
"""

import dataclasses
import pathlib
import re

import pytest

from diloco_jax.protocol import actions
from diloco_jax.protocol.tape import tape as tape_lib
from diloco_jax.report import book as book_lib
from diloco_jax.report import records as records_lib
from diloco_jax.report import run_facts
from diloco_jax.storage import tapes
from diloco_jax.verification.checks import judge_tapes
from diloco_jax.verification.faults import chaos_report
from diloco_jax.verification.replay import tape_files
from tests import programs
from tests.runs.lib import slow_data

DEADLINE_S = 800
# Eight faults, each of which waits for facts.
pytestmark = [pytest.mark.long, pytest.mark.timeout(900)]
LEARNERS = ['l0', 'l1', 'l2']
PLAN = ('cut_up', 'cut_down', 'partition', 'corrupt', 'freeze', 'slow', 'kill', 'replace')
VICTIMS = {kind: LEARNERS[1 + index % 2] for index, kind in enumerate(PLAN)}


@dataclasses.dataclass
class Run:
  """The finished run."""

  workdir: pathlib.Path
  code: int
  output: str
  facts: run_facts.RunFacts
  began_ns: int  # of its first fact, on the clock of the tapes
  fault_runs: dict[str, chaos_report.FaultRun]  # by kind

  def lives(self) -> list[tuple[str, tapes.ProcessTape]]:
    """Every process and the folder of its disk: the second process of a frozen learner has its
    own."""
    second = self.workdir / 'seconds' / VICTIMS['replace']
    return [('', life) for life in tape_files.find(self.workdir)] + [
      ('second', life) for life in tape_files.find(second)
    ]


@pytest.fixture(scope='module', name='run')
def _run(tmp_path_factory) -> Run:
  workdir = tmp_path_factory.mktemp('chaos') / 'run'
  flags = f'--plan={",".join(PLAN)}', '--fault_s=3', '--config.train.checkpoint_every_steps=1000'
  with programs.starting() as start:
    program = start(*programs.diloco('chaos', *flags, slow_data.FLAG, f'--workdir={workdir}'))
    code = program.end(DEADLINE_S)
  rows, fault_runs = records_lib.TailAll(workdir).read(), {}
  run = run_facts.RunFacts(LEARNERS, total_steps=1_000_000).take(rows)
  for _, row in rows:
    if row['name'] == 'faultrun':
      fields = [field.name for field in dataclasses.fields(chaos_report.FaultRun)]
      fault_runs[row['kind']] = chaos_report.FaultRun(**{name: row[name] for name in fields})
  return Run(workdir, code, program.text, run, rows[0][1]['t_ns'], fault_runs)


def test_the_run_succeeds_and_every_invariant_holds(run):
  assert run.code == 0, run.output
  assert not re.search('VIOLATION|NOT AS PROMISED|-> nothing', run.output)


@pytest.mark.parametrize('kind', PLAN)
def test_untouched_learners_continue_and_the_victim_recovers(run, kind):
  fault_run = run.fault_runs[kind]
  assert fault_run.has_victim and fault_run.node == VICTIMS[kind]
  span = (fault_run.began_s, fault_run.ended_s)
  assert fault_run.ended_s - fault_run.began_s >= 3  # two leases
  assert chaos_report.within(run.facts.merges_s, *span) >= 3
  assert chaos_report.within(chaos_report.step_times(run.facts, 'l0'), *span) >= 3
  assert chaos_report.within(run.facts.learners['l0'].merged_s, *span) >= 3
  assert fault_run.recovered_s > fault_run.ended_s


def test_the_untouched_learner_has_one_session_for_the_whole_run(run):
  assert [incarnation for _, incarnation in run.facts.learners['l0'].joined] == [1]


@pytest.mark.parametrize(
  'kind, reason',
  [
    ('freeze', 'lease expired'),
    ('cut_up', 'lease expired'),
    ('partition', 'lease expired'),
    ('replace', 'lease expired'),
    ('corrupt', 'CRC-32'),  # of the payload, or of a chunk's header
  ],
)
def test_the_syncer_knows_why_it_lost_the_victim(run, kind, reason):
  fault_run = run.fault_runs[kind]
  reasons = [
    why
    for at_s, why in run.facts.learners[fault_run.node].lost
    if fault_run.began_s <= at_s <= fault_run.ended_s
  ]
  assert reason in reasons[0], reasons


@pytest.mark.parametrize('kind', ['freeze', 'cut_up', 'cut_down', 'partition', 'corrupt'])
def test_a_process_that_comes_back_keeps_its_incarnation(run, kind):
  assert _incarnations(run, kind) == {1}


def test_a_restarted_process_has_the_next_incarnation(run):
  assert _incarnations(run, 'kill') == {2}


def _incarnations(run: Run, kind: str) -> set[int]:
  """The incarnations in which the victim joined, from the start of the fault to its next merge."""
  fault_run = run.fault_runs[kind]
  return {
    incarnation
    for at_s, incarnation in run.facts.learners[fault_run.node].joined
    if fault_run.began_s <= at_s <= fault_run.recovered_s
  }


def test_a_slowed_process_steps_slowly_and_is_not_lost(run):
  fault_run = run.fault_runs['slow']
  span = (fault_run.began_s, fault_run.ended_s)
  slow = chaos_report.within(chaos_report.step_times(run.facts, fault_run.node), *span)
  assert 0 < slow < chaos_report.within(chaos_report.step_times(run.facts, 'l0'), *span)
  assert not [
    at_s for at_s, _ in run.facts.learners[fault_run.node].lost if span[0] <= at_s <= span[1]
  ]


def test_a_replaced_process_is_fenced_and_never_merged(run):
  """Frozen, replaced under its id, thawed: the process exits with 42."""
  fault_run = run.fault_runs['replace']
  replaced = fault_run.node
  ended_ns = run.began_ns + fault_run.ended_s * 1e9
  assert [life.ended for life in run.facts.learners[replaced].processes] == ['refused']
  assert {
    incarnation
    for at_s, incarnation in run.facts.learners[replaced].joined
    if at_s >= fault_run.began_s
  } == {2}
  turns = [
    record
    for disk, life in run.lives()
    if (disk, life.node) == ('', 'syncer')
    for record in tape_files.read(life)
  ]
  merged = {
    participant.incarnation
    for record in turns
    if record.now_ns > ended_ns
    for action in record.actions
    if isinstance(action, actions.Merge)
    for participant in action.participants
    if participant.learner == replaced
  }
  assert merged <= {2}


def test_the_records_account_for_all_time_of_every_learner(run):
  now_ns = round(run.facts.end_s * 1e9)
  shares = {name: book_lib.as_shares(run.facts.book.partition(name, now_ns)) for name in LEARNERS}
  for of_learner in shares.values():
    assert sum(of_learner.values()) == pytest.approx(1, abs=1e-6)
    assert abs(of_learner.get('other', 0)) < 0.01
  of_victim = shares[VICTIMS['kill']]
  assert of_victim['infra_recovery'] > 0 and of_victim['data_wait'] > 0


def test_every_tape_replays(run):
  for _, life in run.lives():
    assert tape_files.replay(life).identical, life.name


# --- The judge can fail ---------------------------------------------------------------------------


def _node_tapes(run: Run, change) -> list[judge_tapes.Tape]:
  """The tapes of the run; every Merge of the syncer's through `change`."""

  def edit(record: tape_lib.Record) -> tape_lib.Record:
    changed = (
      change(action) if isinstance(action, actions.Merge) else action for action in record.actions
    )
    return dataclasses.replace(record, actions=tuple(changed))

  node_tapes = []
  for _, life in run.lives():
    reader = tape_files.read(life)
    turns = [edit(record) if life.node == 'syncer' else record for record in reader]
    node_tapes.append(judge_tapes.Tape(life.name, reader.header.start, turns))
  return node_tapes


def _with_older_incarnations(merge: actions.Merge) -> actions.Merge:
  """Of every learner one that does not hold the id."""
  participants = tuple(
    dataclasses.replace(participant, incarnation=participant.incarnation - 1)
    for participant in merge.participants
  )
  return dataclasses.replace(merge, participants=participants)


@pytest.mark.parametrize(
  'change, invariant',
  [
    (lambda merge: merge, None),
    (_with_older_incarnations, 'I12'),
    (lambda merge: dataclasses.replace(merge, version=merge.version + 1), 'I3'),
  ],
)
def test_the_judge_refuses_an_edited_tape(run, change, invariant):
  verdict = judge_tapes.judge(_node_tapes(run, change))
  assert (verdict.broken.id if verdict.broken else None) == invariant, verdict.text()
  if invariant:
    assert len(verdict.broken.before) > 1 and verdict.broken.sentence in verdict.text()


def test_the_judge_refuses_a_run_without_tapes():
  with pytest.raises(ValueError, match='no tapes'):
    judge_tapes.judge([])
