"""How we know that it works: a simulated world, injected faults, and invariants that judge runs."""
