"""Starts and ends the programs of a run: flags, the supervisor, engines, restores."""
