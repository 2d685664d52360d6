"""The config of a run, and the objects that learner and syncer must build from it alike.

Where is ...?
  a setting that is not the protocol's, its unit, bounds and default: run_config.py
  what --config=NAME:VARIANT and a config.json become: load.py
  what both sides build from a config: build.py
  who compares what a run reads again: brought.py
"""
