"""The wire: protobuf control messages and raw payload chunks (docs/wire_format.md)."""
