"""Replay: the machines of a run from their tapes, and its arrays from the log."""
