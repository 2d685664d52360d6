"""Beyond the paper: answers to old pseudo-gradients and to liars, all off by default.

  aged      a smaller weight for a learner that has missed syncs: `sync.age_decay`
  majority  a merge that trusts rows with which most others agree: `sync.merge='majority'`

tests/numerics/test_contrib.py is one battery over all of them and the paper's own arithmetic.
"""
