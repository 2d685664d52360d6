"""A second model of the protocol, written from its records alone, against which invariants
compare."""
