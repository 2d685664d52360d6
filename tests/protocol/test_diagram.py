"""docs/protocol.md shows the states that the code has, and every reason of the ledger."""

import importlib.util
import pathlib

import pytest

from diloco_jax.protocol import messages, states

ROOT = pathlib.Path(__file__).parent.parent.parent
SCRIPT = ROOT / 'scripts' / 'protocol_diagram.py'
SPEC = importlib.util.spec_from_file_location('protocol_diagram', SCRIPT)
protocol_diagram = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(protocol_diagram)


def test_the_document_is_drawn_from_the_tables():
  text = protocol_diagram.DOCUMENT.read_text()
  assert protocol_diagram.rewritten(text) == text, 'run: python scripts/protocol_diagram.py'


@pytest.mark.parametrize('title, table', protocol_diagram.TABLES)
def test_what_is_not_drawn_is_not_moved(title, table):
  drawn = {row[:2] for row in table}
  for source, target in drawn:
    assert states.move(table, source, target) == target
    if (target, source) not in drawn:
      with pytest.raises(AssertionError, match=f'no move from {target} to {source}'):
        states.move(table, target, source)


def test_every_reason_is_explained():
  text = protocol_diagram.DOCUMENT.read_text()
  for reason in messages.Reason.ALL:
    assert f'`{reason}`' in text, reason
