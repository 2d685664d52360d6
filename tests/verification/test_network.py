"""Links of so many bytes per second in the simulated world."""

import pytest

from diloco_jax.transport import flow_control
from diloco_jax.verification.sim import engine as engine_lib
from diloco_jax.verification.sim import network as network_lib

SECOND = engine_lib.SECOND
RATE = 1_000_000


class Line:
  """A pipe, and when what it carries has left, in seconds."""

  def __init__(self):
    self.engine = engine_lib.Engine()
    self.pipe = network_lib.Pipe(self.engine, RATE)
    self.left = {}

  def send(self, name, size, session=1, control=False):
    left = lambda: self.left.setdefault(name, self.engine.now_ns / SECOND)
    self.pipe.send(session, size, control, left)

  def run(self, until_s=1_000):
    self.engine.run(round(until_s * SECOND))
    return self.left


@pytest.fixture(name='line')
def _line():
  return Line()


def test_a_payload_takes_its_bytes_divided_by_the_rate_and_the_next_one_follows(line):
  line.send('first', 3 * RATE)
  line.send('second', RATE // 2)
  assert line.run() == {'first': 3.0, 'second': 3.5}


def test_an_idle_pipe_saves_up_nothing(line):
  line.run(7)
  line.send('late', RATE)
  assert line.run() == {'late': 8.0}


def test_two_sessions_have_half_of_the_pipe_each_and_then_one_has_all(line):
  line.send('short', RATE, session=1)
  line.send('long', 3 * RATE, session=2)
  assert line.run() == {'short': 2.0, 'long': 4.0}


def test_who_comes_later_shares_from_then_on(line):
  line.send('first', 2 * RATE, session=1)
  line.run(1)
  line.send('second', RATE, session=2)
  assert line.run() == {'first': 3.0, 'second': 3.0}


def test_control_overtakes_what_flow_control_keeps_back_and_nothing_else(line):
  line.send('payload', 10 * RATE)
  line.send('control', 0, control=True)
  line.send('more', 0, control=True)
  window = network_lib.FRAME_BYTES * 2  # of 0.46 s at this rate, in whole frames
  left = line.run()
  assert left['control'] == pytest.approx(window / RATE)
  assert left['control'] <= left['more'] < left['payload'] == 10.0


def test_what_a_broken_session_has_queued_is_lost_and_frees_the_pipe(line):
  line.send('lost', 10 * RATE, session=1)
  line.send('kept', 2 * RATE, session=2)
  line.run(2)
  line.pipe.forget(1)
  assert line.run() == {'kept': 3.0}


def test_the_window_is_that_of_the_transport():
  assert (network_lib.QUEUE_S, network_lib.SPARE_S, network_lib.FRAME_BYTES) == (
    flow_control.QUEUE_S,
    flow_control.SPARE_S,
    flow_control.LEAST_BYTES,
  )
