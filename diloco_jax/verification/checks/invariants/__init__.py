"""The invariants, a file for each subject."""
