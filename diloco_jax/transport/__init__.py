"""Messages and payloads between nodes: frames, protobuf, gRPC or in-process links, listeners."""

import os

# gRPC reads this at import. The sessions report a lost peer themselves, so gRPC need not log it.
os.environ.setdefault('GRPC_VERBOSITY', 'ERROR')
