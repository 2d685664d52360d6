"""Text from a peer, made fit for a terminal, a log line and an error message."""

SAID_CHARS = 200


def said(text: str, most: int = SAID_CHARS) -> str:
  """`text` on one line of at most `most` characters.

  Characters that are not printable (control characters, line breaks, marks that turn the direction
  of writing, surrogates) are escaped. Of a text that has been here already nothing changes.

  >>> said('a b\\r\\x1b[2J[syncer] all good')
  'a b\\\\r\\\\x1b[2J[syncer] all good'
  >>> said('x' * 201)[-5:], len(said('x' * 201))
  ('xx...', 200)
  """
  text = text if text.isprintable() else ''.join(map(_printable, text[: most + 1]))
  return text if len(text) <= most else f'{text[: most - 3]}...'


def _printable(character: str) -> str:
  return character if character.isprintable() else character.encode('unicode_escape').decode()
