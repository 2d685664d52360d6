"""The one error of what came over the wire and is not what it has to be."""


class WireError(ValueError):
  """Bytes or fields from a peer (or for one) break the format.

  `clause` names the rule that is broken, one word per rule (docs/wire_format.md lists them); the
  text gives what came and what is allowed. The link it came over cannot be trusted any further.
  """

  def __init__(self, clause: str, text: str):
    super().__init__(f'{clause}: {text}')
    self.clause = clause
