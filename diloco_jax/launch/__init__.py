"""Starts and ends programs and nodes: flags, exit codes, the supervisor, loops that users write."""
