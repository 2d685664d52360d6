"""Messages and payloads between nodes: frames, the protobuf schema, gRPC streams, in-process
links."""
