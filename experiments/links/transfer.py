"""One end of a transfer over TCP that measures a link; needs nothing of the project.

    transfer.py receive SKIP             prints its port, then the bytes per second that arrived
    transfer.py send HOST PORT BYTES

The first SKIP bytes are not measured: a shaped link lets a burst through at once.
"""

import socket
import sys
import time

LIMIT_S = 120
PIECE = 1 << 20


def receive(skip: int) -> None:
  buffer = bytearray(PIECE)
  with socket.create_server(('', 0)) as server:
    server.settimeout(LIMIT_S)
    print(server.getsockname()[1], flush=True)
    connection, _ = server.accept()
  with connection:
    connection.settimeout(LIMIT_S)
    arrived = since = 0
    began_s = time.monotonic()
    while count := connection.recv_into(buffer):
      arrived += count
      ended_s = time.monotonic()
      if not since and arrived >= skip:
        since, began_s = arrived, ended_s
  print((arrived - since) / (ended_s - began_s), flush=True)


def send(host: str, port: int, count: int) -> None:
  piece = bytes(min(PIECE, count))
  with socket.create_connection((host, port), LIMIT_S) as connection:
    while count > 0:
      connection.sendall(piece[:count])
      count -= len(piece)


if __name__ == '__main__':
  if sys.argv[1] == 'receive':
    receive(int(sys.argv[2]))
  else:
    send(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]))
