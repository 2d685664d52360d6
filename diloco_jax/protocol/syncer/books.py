"""What the parts of the syncer share: the settings, who the members are, what became of every token
and batch, and the actions of the present turn.

Each part gets the books as its first argument. Its other arguments are the parts that it calls.
"""

from diloco_jax.protocol import action_list
from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol import schedule as schedule_lib
from diloco_jax.protocol import tempo as tempo_lib
from diloco_jax.protocol.syncer import ledger as ledger_lib
from diloco_jax.protocol.syncer import members as members_lib
from diloco_jax.protocol.syncer import shards as shards_lib


class Books:
  """The same objects for all parts, at the start of a new run.

  Attributes:
    config: the protocol's settings.
    agreement: what every learner must share (agreement.encode).
    run: the name of the run.
    schedule: which sync has its turn.
    tempo: the period of the run at present.
    members: learner ids, sessions, leases.
    ledger: the account of every token.
    shards: which learner reads which shard.
    out: the actions of this turn.
  """

  def __init__(self, config: config_lib.ProtocolConfig, agreement: str = '', run: str = ''):
    self.config = config
    self.agreement = agreement
    self.run = run
    self.schedule = schedule_lib.Schedule(config)
    self.tempo = tempo_lib.Tempo(config)
    self.members = members_lib.Members(config)
    self.ledger = ledger_lib.Ledger(config.fragments)
    self.shards = shards_lib.Shards(config.data_shards, config.fragments, bool(config.local))
    self.out = action_list.ActionList()
