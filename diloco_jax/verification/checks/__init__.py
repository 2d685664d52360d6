"""Invariants, judged on every turn of simulated runs and on the tapes of real ones.

Where is ...?
  an invariant: invariants/
  who judges every turn: checkers.py; recorded runs: judge_tapes.py
"""
