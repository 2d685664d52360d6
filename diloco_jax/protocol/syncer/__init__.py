"""The syncer's half of the protocol: `machine.SyncerMachine` and its parts.

Where is ...?
  which sync opens next: pace.py
  when a sync has waited enough: sync.py, grace.py
  whether a payload counts: verdicts.py, syncs.py
  whether a payload is an outlier: screening.py
  whether a message is plausible: plausible.py
  what became of every token: ledger.py
  which shard a learner reads: shards.py
  which links are slow: links.py
  who is sent which version: published.py
  how a learner joins, disconnects, leaves: join.py, members.py
  when the syncer saves, what a restarted one knows: recovery.py
  what the parts of the syncer share: books.py
"""
