"""The arithmetic of the protocol: pure functions of arrays, jit-able, without state of their own.

No function here uses time, sockets or the protocol's state machines.

Where is ...?
  how tensors are cut into fragments: fragments.py
  the codecs, fragment to bytes and back: codecs.py `CODECS`
  what learner and syncer run inside jit: exchange.py
  the merge rules, where one is added, the weights of learners: merge.py `RULES`, `weigh`
  the outer optimizers: outer.py `OUTERS`
  what goes beyond the paper: contrib/
"""
