"""Starts and ends programs: flags, exit codes, the supervisor of a run on one machine."""
