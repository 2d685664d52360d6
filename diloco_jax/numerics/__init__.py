"""The arithmetic of the protocol: pure functions of arrays, jit-able, without state of their own.

  fragments   how a parameter tree is cut into P flat fragments, and put together again
  codecs      how a flat fragment becomes bytes (the byte format is specified there)
  digest      64 bits that tell whether two holders of a fragment hold the same bits
  merge       what a learner's pseudo-gradient counts, and many of them -> one outer gradient
  outer       a merge rule and an optax transform -> the outer optimizer
  spec        how a config names a merge rule or an outer optimizer: 'rda(floor=0.02)'
  exchange    the fused functions that learner and syncer run, made of all of the above

Nothing here knows of time, sockets or the protocol's state machines.
"""
