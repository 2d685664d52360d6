"""Texts that json.loads takes for JSON, or that break it, are one error here."""

import json
import time

import pytest

from diloco_jax.protocol import safe_json

HOSTILE = {
  'a list without an end': '[' * 200_000,
  'an object without an end': '{"a":' * 100_000,
  'lists that end': '[' * 5_000 + ']' * 5_000,
  'one level too deep': '[' * 65 + ']' * 65,
  'deep inside an object': '{"a": ' * 40 + '[' * 40 + ']' * 40 + '}' * 40,
  'NaN': '{"a": NaN}',
  'minus infinity': '-Infinity',
  'beyond floats': '1e999',
  'ten thousand digits': '9' * 10_000,
  'a digit too many': '-' + '9' * 100,
  'half of a pair': '"\\ud800"',
  'not UTF-8': b'"\xff"',
  'UTF-16': '"a"'.encode('utf-16'),
  'nothing': '',
  'two values': '1 2',
  'quotes without an end': '"' + '\\"' * 100_000,
  'nul': '\0',
}


@pytest.mark.parametrize('text', HOSTILE.values(), ids=HOSTILE)
def test_hostile_text_is_refused_soon_and_in_one_line(text):
  began = time.process_time()  # a busy machine does not count
  with pytest.raises(safe_json.Unreadable) as refused:
    safe_json.parse(text)
  assert time.process_time() - began < 2.0
  assert str(refused.value).isprintable() and len(str(refused.value)) < 200


def test_text_beyond_the_limit_is_not_read():
  assert safe_json.parse('[1, 2]', max_bytes=6) == [1, 2]
  with pytest.raises(safe_json.Unreadable, match='7 bytes, at most 6'):
    safe_json.parse('[1, 23]', max_bytes=6)


@pytest.mark.parametrize(
  'value',
  [
    {'a': [1, -2.5, None, True, 'x"[[[[' * 50], 'b': {'c': -(2**250)}},
    [[{}] * 100] * 3,
    '\N{GRINNING FACE} \\ " \n',
    json.loads('[' * 64 + ']' * 64),
  ],
)
def test_what_json_writes_reads_back(value):
  assert safe_json.parse(json.dumps(value)) == value
  assert safe_json.parse(json.dumps(value).encode()) == value


@pytest.mark.parametrize('text', ['[]', 'null', '3', '"{}"'])
def test_an_object_is_no_other_value(text):
  assert safe_json.parse_object('{"a": 1}') == {'a': 1}
  with pytest.raises(safe_json.Unreadable, match='not an object'):
    safe_json.parse_object(text)
