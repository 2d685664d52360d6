"""What is on disk: the write-ahead log, Orbax checkpoints, the store, tapes."""
