"""The shell around the syncer's machine: its process, the global model, its log and its store."""
