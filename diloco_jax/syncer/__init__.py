"""The shell around the syncer's machine: its process, the global model, the log of outer steps."""
