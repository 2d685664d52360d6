"""Messages and payloads between nodes: frames, protobuf, gRPC or in-process links, listeners."""

import os

# gRPC reads this at import. Our own sentences say why a peer is lost or an address cannot be used.
os.environ.setdefault('GRPC_VERBOSITY', 'NONE')
