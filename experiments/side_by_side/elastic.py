"""The syncer of ideal elastic: a barrier at every step over the learners that live."""

from diloco_jax.commands import syncer
from diloco_jax.launch import cli
from diloco_jax.protocol.syncer import pace as pace_lib
from diloco_jax.protocol.syncer import syncs as syncs_lib


def wait_for_live() -> None:
  """From now on a sync in this process opens once all live learners have reached it, and waits for
  their payloads, one lease long. A dead learner is not waited for."""
  needed = pace_lib.Pace._needed
  pace_lib.Pace._needed = lambda self, sync: max(needed(self, sync), len(self.contributors))
  syncs_lib.Syncs._window_ns = lambda self, now_ns, sync: self._config.lease_ns


if __name__ == '__main__':
  wait_for_live()
  cli.run_main(syncer.main)
