"""When an open sync has waited enough: a pure decision with its reason in words.

With K payloads there, the grace window runs; what has arrived when it ends is merged. A payload
that is withdrawn before may take the quorum with it; the window starts anew once K are there again.
"""

from diloco_jax.protocol.syncer import gather as gather_lib


def decide(
  gather: gather_lib.Gather, now_ns: int, quorum: int, live: int, closing: bool
) -> tuple[str, str]:
  """('wait' | 'merge' | 'cancel', why) for one gather.

  Args:
    gather: the sync.
    now_ns: now.
    quorum: K.
    live: how many learners could contribute.
    closing: the sync comes after the last inner step.
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
  # Nobody is left who could still answer: with fewer live learners than K one may yet come (and a
  # lock-step run waits for it), otherwise the sync can never have its quorum.
  if not gather.waiting and (closing or live >= quorum):
    return 'cancel', f'all have answered, {count} payloads of {quorum}'
  return 'wait', f'{count} payloads of {quorum}'
