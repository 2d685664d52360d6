"""A world in virtual time for the production machines: network, hardware, disks, faults, seeds.

Where is ...?
  the world in which simulated machines live: world.py, processes.py, network.py, disk.py
  what a seed draws: random_settings.py, seeds.py
"""
