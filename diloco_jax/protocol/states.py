"""Tables of states: what docs/protocol.md draws is what the machines obey.

A table has a row (source, target, why) for each move. A state lives in one field, and every change
of that field goes through `move`, so a move that is not drawn is never made.
"""

Table = tuple[tuple[str, str, str], ...]


def move(table: Table, source: str, target: str) -> str:
  """The new state, if the table has the move.

  >>> move((('open', 'closed', 'the day is over'),), 'open', 'closed')
  'closed'
  """
  assert any(row[:2] == (source, target) for row in table), f'no move from {source} to {target}'
  return target
