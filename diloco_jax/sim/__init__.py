"""The simulated world: virtual time, network, hardware and disk around the production machines."""
