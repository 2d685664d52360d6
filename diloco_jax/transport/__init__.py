"""Messages and payloads between nodes: frames, protobuf, gRPC or in-process links, listeners.

Where is ...?
  the frames on the wire: chunks.py, translate.py
  where the syncer listens, and at which address: listen.py, addresses.py
  what a session may cost: peer_limits.py, grpc_server.py; on slow links: flow_control.py
  memory for payloads, and what malloc keeps: payloads.py
  sessions in processes of their own: processes/
"""

import os

# gRPC reads this at import. Our own sentences say why a peer is lost or an address cannot be used.
os.environ.setdefault('GRPC_VERBOSITY', 'NONE')
