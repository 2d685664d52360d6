"""The learner's half of the protocol: `machine.LearnerMachine` and its parts.

Where is ...?
  when a learner steps, submits, adopts, ends: machine.py
  what a learner keeps when it adopts: anchor.py
  how a learner connects again: connection.py
  when a learner saves: checkpoints.py
  how long a learner trains alone: alone.py
  when a learner reports that it makes no step: missing_step.py
"""
