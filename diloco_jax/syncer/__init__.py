"""The node of the syncer: the global model, its log and its store around its machine.

Where is ...?
  the outer step, tile by tile: outer_step.py
  where an outer step becomes durable: commit.py `write`
  what happens when the syncer restarts: node.py `recover`, storage/outer_log.py `recover`
  the syncer's part of the store: stored.py
  the held-out loss of the global model: evaluation.py
  who receives the model, and what that may cost: followers.py
"""
