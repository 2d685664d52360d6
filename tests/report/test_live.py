"""What a run shows while it runs: phases, rates, the time that is left."""

import io
import itertools
import types

import pytest

from diloco_jax.config import load
from diloco_jax.configs import stdlib_lm
from diloco_jax.protocol import facts
from diloco_jax.report import facts as report_facts
from diloco_jax.report import live, run_facts, serve
from tests.report.rows import add_of, child, joined, ledger, member, row, startup, step, synced


def test_the_time_left_is_that_of_the_steps_since_a_restart():
  """A step takes 2 s, and the first ones of each process longer; the run was stopped for a day."""
  run = run_facts.RunFacts(['l0', 'l1'], 100)
  for day, first in enumerate((0, 20)):
    start_s = 86_400 * day
    run.take([child(start_s, name, 'starting') for name in run.learners])
    for count in range(1, 21):
      at_s = start_s + 30 + 2 * count + (count > 3) * 60
      run.take([(name, step(at_s, first + count, count)) for name in run.learners])
      if count < 8:
        assert run.seconds_left is None
    assert run.seconds_left == pytest.approx(2 * (80 - first))
    run.take([child(at_s, 'l0', 'down')])
    assert run.seconds_left == pytest.approx(2 * (80 - first))
    run.take([child(at_s, 'l1', 'down')])
    assert run.seconds_left is None


def _joined(at_s: float, name: str) -> list[tuple[str, dict]]:
  return [(name, joined(at_s)), ('syncer', row(at_s, member(name, 'joined')))]


def test_the_state_tells_what_is_waited_for_and_what_is_left():
  run = run_facts.RunFacts(['l0', 'l1'], 100)
  run.take([child(0, 'l0', 'starting'), child(0, 'l1', 'starting')])
  run.take(_joined(2, 'l0'))
  run.take([('l1', startup(2, 'restored'))])
  assert live.status_line(run) == '0%: l0 waiting for l1, l1 compiling'

  run.take(_joined(14, 'l1'))
  for count in range(1, 21):
    run.take([(name, step(14 + 2 * count, count, count)) for name in run.learners])
  assert live.status_line(run) == (
    '20%: l0 training 20, l1 training 20; 2,000 tokens, 200 tokens/s, 2 min 40 s left'
  )


def test_the_line_says_of_what_time_its_goodput_is():
  """That of the report is of all time, with the 30 s before the learner joined."""
  run = run_facts.RunFacts(['l0'], 100)
  run.take([child(0, 'l0', 'starting'), *_joined(30, 'l0'), ('l0', step(31, 1, 1))])
  run.take([('syncer', row(31, synced())), ('syncer', row(31, ledger(50, {}, merged=0)))])
  assert live.status_line(run).endswith('goodput since joined 50.0%')


def test_progress_and_the_time_left_are_those_of_the_global_model():
  """l0 is twice as fast as l1, and has trained to the end when the syncer is at half time."""
  run = run_facts.RunFacts(['l0', 'l1'], 100, steps_per_sync=2.0)
  run.take([*_joined(0, 'l0'), *_joined(0, 'l1')])
  for count in range(1, 51):
    for clock in (2 * count - 1, 2 * count):
      run.take([('l0', step(clock - 1, clock, clock))])
    run.take([('l1', step(2 * count, count, count))])
    if count % 2 == 0:
      run.take([('syncer', row(2 * count, synced(count, 'l1')))])
    if count == 48:
      assert run.progress == 0.5 and run.foremost == 0.96  # the next outer step is at clock 50
  assert run.progress == 0.52
  for count in range(52, 101, 2):
    run.take([('l1', step(2 * count, count, count))])
    run.take([('syncer', row(2 * count, synced(count, 'l1')))])
    assert run.progress == pytest.approx(min(1.0, count / 100 + 0.02))
    if count < 98:
      assert run.seconds_left == pytest.approx(2 * (98 - count))


@pytest.mark.parametrize(
  ('code', 'clock', 'shown'),
  [(0, 100, 'done'), (0, 20, 'stopped'), (1, 20, 'failed (exit code 1)')],
)
@pytest.mark.parametrize('syncer', [True, False])
def test_a_run_that_is_over_shows_no_rate_and_trains_again_once_it_continues(
  code, clock, shown, syncer
):
  """Of threads of a notebook, a baseline, or loops of the user's own: nobody supervises them."""
  run = run_facts.RunFacts(['l0'], 100, syncer=syncer)
  run.take([('l0', step(2 * count, clock - 30 + count, count)) for count in range(1, 31)])
  assert 'training' in live.status_line(run) and 'tokens/s' in live.status_line(run)
  run.take([('syncer', startup(60, 'listens'))] * syncer)
  alone = facts.State(state='disconnected', incarnation=1, clock=clock)
  run.take([('l0', row(61, alone))] * syncer)
  for name in ('syncer',) * syncer + ('l0',):
    run.take([(name, row(62, report_facts.Exit(child=name, pid=1, code=code)))])
  dead = ', the run is dead (the syncer failed (exit code 1))' if syncer and code else ''
  assert live.status_line(run) == f'{clock}%: l0 {shown} {clock}; 1,500 tokens{dead}'
  assert run.seconds_left is None and run.syncer in (None, shown.partition(' (')[0])
  run.take([('l0', startup(70, 'restored'))])
  assert 'l0 compiling' in live.status_line(run)
  run.take([('l0', step(80, clock, 1))])
  assert 'l0 training' in live.status_line(run)


def test_a_fault_of_the_display_is_none_of_the_run(monkeypatch, capsys):
  display = live.Display(stream := io.StringIO())
  monkeypatch.setattr(live, 'status_line', lambda *what: what[-1]['no such field'])
  monkeypatch.setattr(live, '_STATUS_S', 0.0)
  for _ in range(3):
    display.tick(run_facts.RunFacts(['l0'], 100))
  display.listen(live.LOCAL, 'l0: restarted')
  assert capsys.readouterr().err.count('error: the display is missing (TypeError') == 1
  assert 'l0: restarted' in stream.getvalue()


def test_a_status_line_is_printed_only_if_it_says_something_new(monkeypatch):
  now_s = [0.0]
  for name in ('monotonic', 'time'):
    monkeypatch.setattr(live.time, name, lambda: now_s[0])
  display = live.Display(stream := io.StringIO())
  run = run_facts.RunFacts(['l0'], 100)
  for at_s in range(0, 60, 6):
    now_s[0] = at_s
    if at_s == 30:
      run.take([child(0, 'l0', 'starting')])
    display.tick(run)
  assert [line.split(' ', 2)[2] for line in stream.getvalue().splitlines()] == [
    '0%: l0 waiting',
    '0%: l0 importing',
  ]


class _Terminal(io.StringIO):
  def isatty(self) -> bool:
    return True


def test_a_line_fills_the_terminal(monkeypatch):
  monkeypatch.setenv('COLUMNS', '80')
  display = live.Display(stream := _Terminal())
  display.listen('l0', ', '.join(f'word {n}' for n in range(60)))
  lines = stream.getvalue().splitlines()
  assert len(lines) > 5 and max(map(len, lines)) <= 80
  for line, after in itertools.pairwise(lines):
    assert after.startswith('    ') and len(f'{line} {after.split()[0]}') > 80


def test_a_syncer_whose_records_begin_after_those_of_a_learner_is_told_of():
  run = run_facts.RunFacts((), 100, syncer=False)
  first = startup(1, 'assembled')
  run.take([('l0', first), ('syncer', first), ('syncer', startup(1, 'listens'))])
  assert run.condition('syncer').state == 'waiting'


def test_a_page_counts_a_silence_from_the_newest_record(tmp_path, monkeypatch):
  """Whatever the clock of its writer says."""
  now_s, behind_s = [0.0], 30
  clock = types.SimpleNamespace(time=lambda: 1000 + now_s[0], monotonic=lambda: now_s[0])
  monkeypatch.setattr(serve, 'time', clock)
  load.write(tmp_path, stdlib_lm.get_config('tiny'))
  watch = serve.watch_of(tmp_path)
  seen = []
  for now_s[0] in range(0, 27, 2):  # noqa: B020
    if now_s[0] <= 10:
      add_of(tmp_path, 'l0', step(1000 + now_s[0] - behind_s, now_s[0] + 1, now_s[0] + 1))
    so = watch.state()['learners']['l0']['condition']
    seen.append((so['kind'], so['text']))
  assert seen[7] == ('works', 'training') and {kind for kind, _ in seen[1:10]} == {'works'}
  assert seen[11] == ('silent', 'not heard of for 12 s (training before)'), seen
