"""Starts and ends the programs of a run: flags, the supervisor, engines.

Where is ...?
  which programs a run has, and what each needs: spec.py
  who starts the programs of a run: engines/, on this machine local_run.py
  who restarts a program: supervisor.py; the hosts of a learner: process_group.py
"""
