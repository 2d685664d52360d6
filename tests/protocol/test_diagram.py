"""docs/protocol.md shows the states that the code has, and every reason of the ledger."""

import importlib.util
import pathlib

from diloco_jax.protocol import messages

ROOT = pathlib.Path(__file__).parent.parent.parent
SCRIPT = ROOT / 'scripts' / 'protocol_diagram.py'
SPEC = importlib.util.spec_from_file_location('protocol_diagram', SCRIPT)
protocol_diagram = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(protocol_diagram)


def test_the_document_is_drawn_from_the_tables():
  text = protocol_diagram.DOCUMENT.read_text()
  assert protocol_diagram.rewritten(text) == text, 'run: python scripts/protocol_diagram.py'


def test_every_reason_is_explained():
  text = protocol_diagram.DOCUMENT.read_text()
  for reason in messages.Reason.ALL:
    assert f'`{reason}`' in text, reason
