"""Tables of states: the machines obey the tables that docs/protocol.md draws.

A table has a row (source, target, why) for each move. One field holds the state, and every change
of that field calls `move`, so a machine makes no move that is not drawn.
"""

Table = tuple[tuple[str, str, str], ...]


def move(table: Table, source: str, target: str) -> str:
  """The new state, if the table has the move.

  >>> move((('open', 'closed', 'the day is over'),), 'open', 'closed')
  'closed'
  """
  assert any(row[:2] == (source, target) for row in table), f'no move from {source} to {target}'
  return target
