"""Faults for real processes, and the plans that simulated and real runs share."""
