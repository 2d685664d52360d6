"""Beyond the paper: answers to old pseudo-gradients and to liars.

  aged      a smaller weight for a learner on a slow link that has missed syncs
  majority  a merge that trusts rows with which most others agree: `sync.merge='majority'`

tests/numerics/test_contrib.py is one battery over all of them and the paper's own arithmetic.
"""
