"""Invariants, judged on every turn of simulated runs and on the tapes of real ones."""
