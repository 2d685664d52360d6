"""What is on disk: the write-ahead log, Orbax checkpoints, the note of a restore, tapes."""
