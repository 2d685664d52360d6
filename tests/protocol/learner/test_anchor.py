"""What a learner keeps when it adopts a version (docs/protocol.md, "Adoption")."""

import dataclasses

import pytest

from diloco_jax.protocol.learner import anchor as anchor_lib
from diloco_jax.protocol.messages import Reason
from tests.protocol.single import publish

STEPS, TOKENS = 9, 90  # of the learner at the adoption


def anchor(capture: int | None = None, **values) -> anchor_lib.Anchor:
  """Version 1, of which the first 4 steps are settled; captured for this sync after 7 steps."""
  value = anchor_lib.Anchor(version=1, digest=0, steps=4, tokens=40, adopted=5, **values)
  if capture is not None:
    value.capture = anchor_lib.Capture(capture, 7, 70)
  return value


@pytest.mark.parametrize(
  'capture, misses, settled_to, keep, max_misses, base, merged, reason',
  [
    # The capture was merged: the next range begins where it ended.
    (6, 2, 70, True, 2, 70, True, ''),
    # It was late or is not decided yet, or there is none: everything is kept.
    (6, 0, 40, True, 2, 40, False, ''),
    (None, 0, 40, True, 2, 40, False, ''),
    (None, 2, 40, True, 2, 40, False, ''),
    # More than max_misses payloads in a row came too late.
    (None, 3, 40, True, 2, 90, False, Reason.LATE),
    (6, 1, 40, True, 0, 90, False, Reason.LATE),
    # The syncer refused an update, or repairs bits.
    (6, 0, 70, False, 2, 90, False, Reason.UNDONE),
    (None, 0, 40, False, 2, 90, False, Reason.UNDONE),
    # The ledger has settled tokens of which the learner knows nothing.
    (6, 0, 60, True, 2, 90, False, Reason.UNDONE),
    (None, 0, 70, True, 2, 90, False, Reason.UNDONE),
    # It does not rebase.
    (6, 0, 70, True, None, 90, False, Reason.OVERWRITTEN),
  ],
)
def test_an_adoption_keeps_what_is_not_settled(
  capture, misses, settled_to, keep, max_misses, base, merged, reason
):
  said = publish(6, 0, version=2, settled_to=settled_to, keep=keep)
  new, kept, was_merged = anchor(capture, misses=misses).adopt(said, STEPS, TOKENS, max_misses)
  assert (new.tokens, new.steps) == (base, base // 10)
  assert (kept, was_merged, new.reason) == (base != TOKENS, merged, reason)
  assert (new.version, new.adopted) == (2, STEPS)
  undecided = capture is not None and kept and not merged
  assert (new.capture is not None) == undecided, 'it may still be merged'


@pytest.mark.parametrize('capture', [None, 6])
@pytest.mark.parametrize('settled_to', [40, 70])
def test_steps_are_carried_over_eight_versions_and_no_more(capture, settled_to):
  far = publish(6, 0, version=1 + anchor_lib.MOST_VERSIONS, settled_to=settled_to)
  _, kept, merged = anchor(capture).adopt(far, STEPS, TOKENS, 2)
  assert kept == (capture is not None or settled_to == 40)
  assert merged == (capture is not None and settled_to == 70)
  farther = dataclasses.replace(far, version=far.version + 1)
  new, kept, merged = anchor(capture).adopt(farther, STEPS, TOKENS, 2)
  assert (kept, merged, new.reason) == (False, False, Reason.LATE)
  assert (new.tokens, new.steps, new.capture) == (TOKENS, STEPS, None)


def test_misses_are_payloads_in_a_row_that_came_too_late():
  current = anchor()
  for version in (2, 3, 4):  # the learner is not pulled
    current, kept, _ = current.adopt(publish(6, 0, version, settled_to=40), STEPS, TOKENS, 2)
    assert kept and current.misses == 0
  for misses in (1, 2):
    current.capture = anchor_lib.Capture(10, 9, 90)
    current.rejected(10, missed=True)
    assert current.misses == misses
  current.capture = anchor_lib.Capture(14, 9, 90)
  current.rejected(14, missed=False)
  assert current.misses == 2, 'its sync was cancelled'
  current, _, _ = current.adopt(publish(14, 0, 5, settled_to=40), STEPS, TOKENS, 2)
  current.capture = anchor_lib.Capture(18, 9, 90)
  current, kept, merged = current.adopt(publish(18, 0, 6, settled_to=90), 12, 120, 2)
  assert kept and merged and current.misses == 0


def test_a_capture_for_a_later_sync_outlives_an_adoption():
  new, kept, merged = anchor(capture=8).adopt(publish(6, 0, 2, settled_to=40), STEPS, TOKENS, 2)
  assert kept and not merged
  assert new.capture == anchor_lib.Capture(8, 7, 70) and new.tokens == 40


def test_a_process_without_the_fragment_keeps_nothing():
  current = anchor_lib.Anchor(anchor_lib.UNKNOWN.version, anchor_lib.UNKNOWN.digest)
  new, kept, _ = current.adopt(publish(6, 0, version=2), 3, 30, 2)
  assert not kept and (new.steps, new.tokens) == (3, 30)


def test_a_payload_covers_what_is_not_settled():
  current = anchor()
  covers = {'sync': 6, 'version': 1, 'steps': 3, 'tokens_from': 40, 'tokens_to': 70}
  assert current.give(6, 7, 70) == covers
  assert current.capture == anchor_lib.Capture(6, 7, 70)


def test_a_verdict_frees_only_its_own_capture():
  current = anchor(capture=6)
  current.rejected(5, missed=True)
  assert current.capture is not None
  current.rejected(6, missed=True)
  assert current.capture is None


def test_a_new_session_keeps_a_capture_only_if_the_ledger_has_settled_it():
  current = anchor(capture=6)
  current.settled(70)
  assert current.capture is not None, 'merged while the session was broken'
  current.settled(40)
  assert current.capture is None, 'it was dropped with the last session'


def test_steps_that_are_undone_are_reported_once():
  current = anchor(capture=6)
  current.rewind(9, 90)
  assert (current.steps, current.tokens, current.capture) == (9, 90, None)
  kept, *_ = current.adopt(publish(6, 0, version=2, settled_to=40), STEPS, TOKENS, 2)
  assert kept.reason == Reason.UNDONE, 'the syncer has not heard of it'
  fresh = anchor()
  fresh.rewind(4, 40)
  assert fresh.reason == '', 'there was nothing to undo'


@pytest.mark.parametrize(
  'version, whole, covered',
  [(0, False, True), (1, False, True), (1, True, False), (2, False, False)],
)
def test_an_older_publish_needs_no_adoption(version, whole, covered):
  said = publish(6, 0, version)
  if whole:
    said = dataclasses.replace(said, base_version=None)
  assert anchor().covers(said) == covered
