"""Every field of the config has a doc, which `--helpfull` shows with its type and default."""

import pytest

from diloco_jax.config import fields
from diloco_jax.protocol import config as config_lib
from tests.launch.lib import command_line

FIELDS = {field.name: field for field in fields.walk()}


def test_every_field_has_a_doc():
  assert not [name for name, field in FIELDS.items() if not field.doc]
  settings = config_lib.TABLE.values()
  assert FIELDS.keys() > {row.name for row in settings if '.' in row.name}


@pytest.mark.parametrize(
  'name, kind, default, doc',
  [
    ('model.num_layers', 'int', '4', 'how many blocks of attention and feed-forward'),
    ('sync.max_lag', 'int or none', 'none', 'how many steps a learner may run ahead of the oldest'),
    ('sync.lease_s', 'float', '10.0', 'a learner that sends nothing for this long is lost'),
    ('train.store_log', 'bool', 'false', 'whether the record of every outer step is in the store'),
    ('model', 'section', '', 'the shape of the decoder'),
  ],
)
def test_a_field(name: str, kind: str, default: str, doc: str):
  field = FIELDS[name]
  assert (field.type, field.default) == (kind, default) and field.doc.startswith(doc)


def test_help_shows_every_field():
  shown = ' '.join(command_line.diloco('train', '--helpfull').stdout.split())
  for field in FIELDS.values():
    assert ' '.join(field.text(80).split()) in shown
