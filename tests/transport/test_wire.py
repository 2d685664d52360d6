"""The checksum detects every error of a Control stream; docs/wire_format.md is right."""

import pathlib
import re
import zlib

import pytest

from diloco_jax.protocol import messages
from diloco_jax.transport import chunks, control_crc, translate

DOC = (pathlib.Path(__file__).parents[2] / 'docs' / 'wire_format.md').read_text()

ENVELOPES = (b'first', b'2', b'third envelope')


def seal_all() -> list[bytes]:
  seal = control_crc.Seal()
  return [seal.close(envelope) for envelope in ENVELOPES]


def open_all(stream: list[bytes]) -> list[bytes]:
  seal = control_crc.Seal()
  return [seal.open(data) for data in stream]


def test_golden_bytes():
  assert tuple(open_all(seal_all())) == ENVELOPES
  crc32 = zlib.crc32(b'first').to_bytes(4, 'little')
  assert seal_all()[0] == b'first' + bytes([15 << 3 | 5]) + crc32


def test_every_flipped_bit_is_detected():
  stream = seal_all()
  for which, data in enumerate(stream):
    for bit in range(8 * len(data)):
      flipped = bytearray(data)
      flipped[bit // 8] ^= 1 << bit % 8
      with pytest.raises(control_crc.WireError) as caught:
        open_all([*stream[:which], bytes(flipped), *stream[which + 1 :]])
      assert caught.value.clause == 'checksum'


@pytest.mark.parametrize('order', [(1, 2), (0, 2), (0, 0, 1), (1, 0), (2,)])
def test_a_missing_repeated_or_moved_message_is_detected(order):
  stream = seal_all()
  with pytest.raises(control_crc.WireError):
    open_all([stream[which] for which in order])


def test_the_table_has_every_message_with_its_direction_and_payload():
  rows = re.findall(r'^\| `([A-Z]\w+)` \| (\w+) \| ([^|]*)\|', DOC, re.M)
  senders = {
    'learner': set(translate.LEARNER_TO_SYNCER.classes),
    'syncer': set(translate.SYNCER_TO_LEARNER.classes),
  }
  senders['both'] = senders['learner'] & senders['syncer']
  assert {name for name, _, _ in rows} == {
    cls.__name__ for cls in senders['learner'] | senders['syncer']
  }
  for name, sender, payload in rows:
    cls = getattr(messages, name)
    assert cls in senders[sender] and (sender == 'both' or cls not in senders['both'])
    assert bool(payload.strip()) == ('payload' in cls.__dataclass_fields__)


def test_the_frame_table_is_the_header():
  rows = re.findall(r'^\| (\d+) \| ?(\d*) \| (\w+) \|', DOC, re.M)
  offset = 0
  for start, size, name in rows:
    assert int(start) == offset, name
    offset += int(size or 0)
  assert offset == chunks.HEADER_BYTES == int(rows[-1][0])
  specification = re.findall(r'^ +(\d+) +(\d*) (\w+)', chunks.__doc__, re.M)
  assert [(s, n) for s, _, n in rows] == [(s, n) for s, _, n in specification]


def test_every_clause_is_in_the_table():
  raised = set()
  for module in (chunks, translate):
    raised |= set(
      re.findall(
        r"WireError\(\s*'(\w+)'", pathlib.Path(module.__file__).read_text(encoding='utf-8')
      )
    )
  table = DOC[DOC.index('| clause |') : DOC.index('Between the streams')]
  cells = [line.split('|')[1] for line in table.splitlines() if line.startswith('| `')]
  assert {c for cell in cells for c in re.findall(r'`(\w+)`', cell)} == raised
