"""A world in virtual time for the production machines: network, hardware, disks, faults, seeds."""
