"""The seam between a machine and the world: one loop and its ports.

Where is ...?
  how a machine is served: loop.py
  what a machine may ask of the world: ports.py
"""
