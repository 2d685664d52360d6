"""Transport processes: the syncer's end of the wire in processes of their own.

One Python process moves about a gigabyte a second, since gRPC holds the interpreter lock for a part
of each byte. Here S processes accept the sessions of one address, each as `GrpcSyncerTransport`
does, and payloads are in memory that they share with the syncer's process (blocks.py, channel.py):
it reads and writes no byte for a socket. The kernel spreads connections over the processes
(SO_REUSEPORT). Machine, log and recovery do not depend on this: parent.py is one more
`node.ports.Transport`.
"""
