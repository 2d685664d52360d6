"""What is on disk: the write-ahead log, Orbax checkpoints, manifests of run snapshots, tapes."""
