"""Whether the payloads of a learner fit through its uplink, if that is capped."""

from diloco_jax.config import build

MBIT_BYTES = 125_000


def note(assembled: build.Assembly) -> str:
  """One line that says which inner steps sync.uplink_mbit_s allows, and what to change for shorter
  ones; '' without a cap.

  The largest payload must leave within `overlap` steps (one, if a learner waits for its syncs), and
  one of each fragment within H steps, else a queue of them grows.
  """
  rate = assembled.config.sync.uplink_mbit_s
  if not rate:
    return ''
  config, sizes = assembled.protocol, assembled.payload_bytes
  largest_s, period_s = (size / (rate * MBIT_BYTES) for size in (max(sizes), sum(sizes)))
  step_s = max(largest_s / max(1, config.overlap), period_s / config.period)
  return (
    f'sync.uplink_mbit_s={rate}: a payload takes up to {largest_s:.3g} s, those of a period '
    f'{period_s:.3g} s. They fit into sync.overlap={config.overlap} and sync.period='
    f'{config.period} steps if a step takes {step_s:.3g} s or more. With shorter steps the syncer '
    'asks for payloads of sync.codec_up_slow, and if these are late, too, in fewer periods: allow '
    'more Mbit/s, or make sync.period longer.'
  )
