"""Decides when an open sync has waited long enough: a pure decision with its reason as text.

The grace window runs once K payloads have arrived; the sync merges all payloads that have arrived
when it ends. If a withdrawn payload breaks the quorum, the window starts again with the next K-th
payload.
"""

from diloco_jax.protocol.syncer import gather as gather_lib


def decide(
  gather: gather_lib.Gather, now_ns: int, quorum: int, live: int, closing: bool
) -> tuple[str, str]:
  """('wait' | 'merge' | 'cancel', why) for one gather.

  Args:
    gather: the sync.
    now_ns: the present time.
    quorum: K.
    live: how many learners could contribute.
    closing: whether the sync is after the last inner step.
  """
  count = len(gather.payloads)
  if gather.merging:
    return 'wait', 'merging'
  if count >= quorum:
    if not gather.waiting:
      return 'merge', f'all {count} have answered'
    if gather.deadline_ns is not None and now_ns >= gather.deadline_ns:
      return 'merge', f'grace is over: {count} payloads, {len(gather.waiting)} learners missing'
    return 'wait', f'quorum {count} >= {quorum}, grace runs'
  # No asked learner can still answer. With fewer live learners than K another may join (and a
  # lock-step run waits for it); otherwise the sync can never reach its quorum.
  if not gather.waiting and (closing or live >= quorum):
    return 'cancel', f'all have answered, {count} payloads of {quorum}'
  return 'wait', f'{count} payloads of {quorum}'
