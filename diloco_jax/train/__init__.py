"""One island: a mesh, a model, an inner optimizer and a data stream. It also trains alone."""
