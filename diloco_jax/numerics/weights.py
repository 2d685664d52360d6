"""Token weights: what a learner's pseudo-gradient counts in a merge (paper, section 4).

  w_m = c_tokens[m] * (c_tokens[m] / c_steps[m])

"Quantity times quality": the tokens trained on since the learner last adopted the fragment, times
the tokens per step (a pseudo-gradient of large batches is less noisy than one of many small ones).
"""

import jax
import jax.numpy as jnp


def token_weights(tokens_M: jax.Array, steps_M: jax.Array) -> jax.Array:
  """The weights float32[M]; a learner without tokens or steps is absent and weighs 0.

  Only ratios matter to a merge rule, so the unit is of no importance.

  >>> token_weights(jnp.array([800, 400, 0]), jnp.array([8, 8, 0])).tolist()
  [80000.0, 20000.0, 0.0]
  """
  tokens = jnp.asarray(tokens_M, jnp.float32)
  steps = jnp.asarray(steps_M, jnp.float32)
  present = (tokens > 0) & (steps > 0)
  return jnp.where(present, tokens * (tokens / jnp.where(present, steps, 1.0)), 0.0)
