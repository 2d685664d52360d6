"""Text from a peer, made fit for a terminal, a log line and an error message."""

MOST_CHARS = 200


def printable(text: str, most: int = MOST_CHARS) -> str:
  """`text` on one line of at most `most` characters.

  Characters that are not printable (control characters, line breaks, marks that turn the direction
  of writing, surrogates) are escaped. A text that is printable does not change.

  >>> printable('a b\\r\\x1b[2J[syncer] all good')
  'a b\\\\r\\\\x1b[2J[syncer] all good'
  >>> printable('x' * 201)[-5:], len(printable('x' * 201))
  ('xx...', 200)
  """
  if not text.isprintable():
    text = ''.join(
      char if char.isprintable() else char.encode('unicode_escape').decode()
      for char in text[: most + 1]
    )
  return text if len(text) <= most else f'{text[: most - 3]}...'
