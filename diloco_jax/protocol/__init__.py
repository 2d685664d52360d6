"""The protocol: two deterministic state machines, standard library only.

No sockets, clocks, threads or arrays: events come in, actions go out.
"""
