"""The shells around the machines: sockets, threads, wall clocks, files and processes."""
