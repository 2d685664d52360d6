"""One island: a mesh, a model, an inner optimizer and a data shard. It also trains alone."""
