"""Processes that follow a run of real processes with a task."""

import re

import pytest

import diloco_jax
from tests import programs


@pytest.mark.long
def test_a_run_is_followed_to_its_end_and_a_killed_follower_changes_nothing(tmp_path):
  run = tmp_path / 'run'
  flags = '--config=stdlib_lm:tiny', '--config.train.steps=60', '--config.sync.learners=1'
  flags += (f'--workdir={run}',)
  with programs.starting() as start:
    diloco = lambda *words: start(*programs.diloco(*words))
    syncer = diloco('syncer', *flags)
    syncer.wait_for('the syncer listens on')
    follow = lambda command, *words: diloco(command, f'--workdir={run}', '--follow', *words)
    follows, killed = follow('evaluate'), follow('evaluate')
    samples = follow('sample', '--tokens=5')
    for follower in (follows, killed, samples):
      follower.wait_for('version 0: ')
    killed.process.kill()
    learner = diloco('learner', *flags, '--learner=l0', f'--syncer=file:{run}/syncer/address')
    for follower in (learner, syncer, follows, samples):
      assert follower.end() == 0, follower
  line = re.compile(r'version (\d+): held-out loss [\d.]+ \([\d.]+ bits per byte\) in 1 batches')
  versions = [int(line.match(text)[1]) for text in follows.lines if 'version' in text]
  assert len(versions) > 1 and versions == sorted(set(versions))
  assert any(re.fullmatch(r'version \d+: ', text) for text in samples.lines)
  counts = [row['count'] for row in diloco_jax.records(run) if row['name'] == 'followers']
  assert 2 in counts and counts[-1] == 0
