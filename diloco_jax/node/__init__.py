"""The seam between a machine and the world: one loop and its ports."""
