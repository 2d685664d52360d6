"""What users import: join, run, open_run, run_syncer, load_params, and the single controller.

Where is ...?
  how a loop of a user's own becomes a learner: peer.py `join`, own_node.py, process/bring.py,
    process/own_model.py
  which learner a loop is that names none: admission.py `choose`
  how a loop meets its syncer: admission.py `meet`
  what a loop is warned of: advice.py
  what of the state of a loop is exchanged: states.py
  what a loop measures beside its loss: peer.py `_measure`
  learners and syncer in one process: single_controller.py
  the trained model, read from a folder: load_params.py
  a program that receives the model while the run goes on: follow.py, process/follower.py
  the newest versions of it side by side, for samplers: versions.py
"""
