"""A process of a run: its start and end, the learner's and the syncer's node, a loop's model.

Where is ...?
  what SIGTERM and Ctrl-C do: lifecycle.py `stops`, exits.py, protocol/learner/machine.py `_end`
  the exit codes: exits.py
  the process of a learner, a syncer, a follower: learner_node.py, syncer_node.py, follower_node.py
  how the hosts of a learner begin and end: learner_node.py `together`, `at_once`
  how a model reaches its syncer: own_model.py, bring.py
"""
