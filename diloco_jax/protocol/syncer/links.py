"""The links of the learners, as the syncer measures them."""

from diloco_jax.protocol.syncer import members as members_lib


class Links:
  """Decides which learner's up-link needs smaller payloads."""

  def narrow(self, member: members_lib.Member) -> bool:
    """Whether the payloads of this learner are to be of the smaller codec (sync.codec_up_slow)."""
    del member
    return False
