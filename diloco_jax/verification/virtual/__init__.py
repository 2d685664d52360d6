"""Training in virtual time: the simulated world with the real arrays, in one process."""
