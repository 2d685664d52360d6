"""How we know that it works: a simulated world, injected faults, and invariants that judge runs.

Where is ...?
  a fault: plans.py, verification/sim/faults.py, verification/faults/inject_faults.py
"""
