"""Messages and payloads between nodes: frames, the protobuf schema, gRPC streams, in-process
links, and who may open one."""

import os

# gRPC reads this at import. The sessions report a lost peer themselves, so gRPC need not log it.
os.environ.setdefault('GRPC_VERBOSITY', 'ERROR')
