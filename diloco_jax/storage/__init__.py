"""What is on disk: the write-ahead log, Orbax checkpoints, the store, tapes.

Where is ...?
  what a record of the log holds: outer_log.py
  how a record becomes durable: wal.py, from syncer/commit.py `write`
  states, what is verified, chosen, fetched: states.py; the digests of arrays: tree_digest.py
  checkpoints of one node: checkpoint.py
  the store, for what outlives a machine: store.py, claim.py
  of which run a folder is, and how it goes back: lineage.py
  how a file of a run is read: json_files.py, files.py
  a Hugging Face folder, names and shapes of tensors: hugging_face.py
  *.safetensors, and a run that begins with one: arrays.py `export`, `start`
"""
