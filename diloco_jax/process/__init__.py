"""The processes of a run: how each begins and ends, and how a loop's model reaches the syncer.

Where is ...?
  what SIGTERM and Ctrl-C do: lifecycle.py `ending_on_signals`, exits.py,
    protocol/learner/machine.py `_end`
  the exit codes: exits.py
  the process of a learner, a syncer, a follower: learner.py, syncer.py, follower.py
  how the hosts of a learner begin and end: learner.py `connected_hosts`, `crashing_at_once`
  how a model reaches its syncer: own_model.py, bring.py
  how a run goes back to an earlier clock: restore.py
"""
