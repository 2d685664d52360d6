"""The arithmetic of the protocol: pure functions of arrays, jit-able, without state of their own.

  fragments   cuts a parameter tree into P flat fragments, and puts them together again
  codecs      turns a flat fragment into bytes (its docstring is the byte format)
  digest      64 bits that show whether learner and syncer hold the same value
  merge       the weights of learners; M pseudo-gradients -> one outer gradient
  outer       a merge rule and an optax transform -> the outer optimizer
  contrib     beyond the paper: age-aware weights, trust by majority
  spec        the names of merge rules and outer optimizers in a config: 'rda(floor=0.02)'
  exchange    the fused functions that learner and syncer run, made of all of the above

No function here uses time, sockets or the protocol's state machines.
"""
