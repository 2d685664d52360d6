"""The commands of `diloco`, one module each: its flags and its `main` (diloco_jax/__main__.py).

Where is ...?
  what is checked before a launch writes or starts anything: launch.py, launch/engines/
"""
