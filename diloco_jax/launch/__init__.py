"""Starts and ends programs and nodes: flags, exit codes, the supervisor, loops of a user's own."""
