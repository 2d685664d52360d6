"""Own models and own loops, each in one file."""
