"""The arithmetic of the protocol: pure functions of arrays, jit-able, without state of their own.

  fragments   how a parameter tree is cut into P flat fragments, and put together again
  codecs      how a flat fragment becomes bytes (the byte format is specified there)
  digest      64 bits that tell whether two holders of a fragment hold the same bits
  weights     what a learner's contribution counts
  merge       many pseudo-gradients -> one outer gradient
  outer       a merge rule and an optax transform -> the outer optimizer
  exchange    the fused functions that learner and syncer run, made of all of the above

Nothing here knows of time, sockets or the protocol's state machines.
"""
