"""The loop and the tape: a turn is written before its actions, and a crash names its tape."""

from typing import Any

import pytest

from diloco_jax.node import loop
from diloco_jax.protocol import actions, events


class World:
  """All ports with the tape in one object, which records the calls in one list."""

  def __init__(self):
    self.asked: list[Any] = []

  def now_ns(self) -> int:
    return 7

  def submit(self, action: actions.Work) -> None:
    self.asked.append(action)

  def record(self, now_ns: int, event: events.Event, asked: Any) -> None:
    self.asked.append((now_ns, event, list(asked)))

  def crash(self, now_ns: int, event: events.Event, error: Exception) -> str:
    self.asked.append((now_ns, event, error))
    return 'It is on the tape X.'


class Machine:
  """Steps once, then raises or exits."""

  deadline_ns = None

  def __init__(self, last: Exception | actions.Exit):
    self._answers: list[Any] = [[actions.Step(clock=0)], last]

  def handle(self, now_ns: int, event: events.Event) -> list[actions.Action]:
    answer = self._answers.pop(0)
    if isinstance(answer, Exception):
      raise answer
    return answer if isinstance(answer, list) else [answer]


def run(last: Any, world: World, tape: World | None) -> actions.Exit:
  event_queue = loop.EventQueue()
  event_queue.post(events.Wake())
  event_queue.post(events.Stop(reason='x'))
  return loop.Node(Machine(last), event_queue, world, world, world, world, world, tape).run()


def test_a_turn_is_on_the_tape_before_its_actions_are_carried_out():
  world, end = World(), actions.Exit(code=0, text='done')
  assert run(end, world, world) == end
  step = actions.Step(clock=0)
  assert world.asked == [(7, events.Wake(), [step]), step, (7, events.Stop(reason='x'), [end])]


@pytest.mark.parametrize(
  'kept, words',
  [
    (True, 'It is on the tape X.'),
    (False, 'There is no tape.'),
  ],
)
def test_a_machine_that_raises_names_its_tape(kept: bool, words: str):
  world, error = World(), KeyError('l7')
  with pytest.raises(loop.MachineCrash) as raised:
    run(error, world, world if kept else None)
  text = str(raised.value)
  assert text == f"the machine raised KeyError: 'l7', on Stop(reason='x'). {words}"
  assert raised.value.__cause__ is error
  assert (world.asked[-1] == (7, events.Stop(reason='x'), error)) == kept
