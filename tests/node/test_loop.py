"""The loop: events in, actions out to the right port, in order, until Exit."""

import queue
import threading
from typing import Any

import pytest

from diloco_jax.node import loop
from diloco_jax.protocol import actions, events, facts, messages
from diloco_jax.protocol import config as config_lib
from diloco_jax.protocol.learner import machine as learner_machine
from diloco_jax.protocol.syncer import machine as syncer_machine
from diloco_jax.transport import in_process
from diloco_jax.transport import payloads as payloads_lib

DEADLINE_S = 30
AGREEMENT = '{}'
PAYLOAD = bytes(range(64))
CANCELLED = facts.Cancelled(sync=1, fragment=0, why='all')
ANNOUNCED = messages.Payload(size_bytes=len(PAYLOAD), crc32=0)


class Ports:
  """Clock, transport, work and records in one object, which records its calls."""

  def __init__(self):
    self.asked: list[Any] = []
    self.time_ns = 0

  def now_ns(self) -> int:
    return self.time_ns

  def dial(self, session: int) -> None:
    self.asked.append(('dial', session))

  def send(self, session: int, message: Any, payload: Any) -> None:
    self.asked.append(('send', session, message, payload))

  def admit(self, session: int) -> None:
    self.asked.append(('admit', session))

  def handled(self, session: int) -> None:
    self.asked.append(('handled', session))

  def close(self, session: int, reason: str) -> None:
    self.asked.append(('close', session, reason))

  def submit(self, action: Any) -> None:
    self.asked.append(('work', action))

  def report(self, fact: facts.Fact) -> None:
    self.asked.append(('report', fact))

  def say(self, text: str) -> None:
    self.asked.append(('say', text))

  def record(self, now_ns: int, event: events.Event, asked: Any) -> None:
    self.asked.append((now_ns, event, list(asked)))

  def crash(self, now_ns: int, event: events.Event, error: Exception) -> str:
    self.asked.append((now_ns, event, error))
    return 'It is on the tape X.'


class Script:
  """A machine that answers each event with the next actions of its script, or raises."""

  deadline_ns: int | None = None

  def __init__(self, *answers: list[actions.Action] | Exception):
    self._answers = list(answers)
    self.seen: list[tuple[int, events.Event]] = []

  def handle(self, now_ns: int, event: events.Event) -> list[actions.Action]:
    self.seen.append((now_ns, event))
    answer = self._answers.pop(0)
    if isinstance(answer, Exception):
      raise answer
    return answer


def run(
  machine: Any, ports: Ports, *posted: events.Event, payloads: Any = None, tape: Any = None
) -> actions.Exit:
  event_queue = loop.EventQueue()
  for event in posted:
    event_queue.post(event)
  return loop.Node(machine, event_queue, ports, ports, ports, payloads, ports, tape).run()


def test_actions_reach_their_ports_in_order_until_exit():
  payloads, ports = payloads_lib.PayloadStore(), Ports()
  payload_id = payloads.put(PAYLOAD)
  step, end = actions.Step(clock=3), actions.Exit(code=0, text='done')
  machine = Script(
    [
      actions.Dial(session=1),
      actions.Admit(session=1),
      actions.Send(session=1, message=messages.Heartbeat()),
      actions.Send(session=1, message=messages.Leave(reason='x'), payload_id=payload_id),
      actions.Drop(payload_id=payload_id),
      step,
      actions.Report(fact=CANCELLED),
      actions.Say(text='hello'),
      actions.Close(session=1, reason='over'),
    ],
    [end, actions.Say(text='never said')],
  )
  stops = events.Stop(reason='a'), events.Stop(reason='b')
  assert run(machine, ports, *stops, payloads=payloads) == end
  assert ports.asked == [
    ('dial', 1),
    ('admit', 1),
    ('send', 1, messages.Heartbeat(), None),
    ('send', 1, messages.Leave(reason='x'), PAYLOAD),
    ('work', step),
    ('report', CANCELLED),
    ('say', 'hello'),
    ('close', 1, 'over'),
  ]
  assert [event.reason for _, event in machine.seen] == ['a', 'b']


def test_the_transport_hears_of_every_message_that_was_handled():
  ports, end = Ports(), actions.Exit(code=0, text='')
  machine = Script([actions.Say(text='first')], [], [end])
  received = events.Received(session=3, message=messages.Heartbeat())
  run(machine, ports, received, events.Connected(session=4), events.Stop(reason='x'))
  assert ports.asked == [('say', 'first'), ('handled', 3)]


def test_a_failed_port_ends_the_node_after_the_earlier_events():
  event_queue, ports, machine = loop.EventQueue(), Ports(), Script([])
  event_queue.post(events.Stop(reason='a'))
  event_queue.fail(OSError('the disk'))
  event_queue.post(events.Stop(reason='b'))
  with pytest.raises(OSError, match='the disk'):
    loop.Node(machine, event_queue, ports, ports, ports, None, ports).run()
  assert [event.reason for _, event in machine.seen] == ['a']


def test_the_deadline_wakes_the_machine():
  ports, machine = Ports(), Script([actions.Exit(code=0, text='woken')])
  ports.time_ns, machine.deadline_ns = 5_000_000, 7_000_000
  assert run(machine, ports).text == 'woken'
  assert machine.seen == [(5_000_000, events.Wake())]


def test_a_past_deadline_wakes_at_once_but_after_the_earlier_events():
  ports, machine = Ports(), Script([], [actions.Exit(code=0, text='')])
  ports.time_ns, machine.deadline_ns = 9, 3
  run(machine, ports, events.Stop(reason='first'))
  assert [type(event) for _, event in machine.seen] == [events.Stop, events.Wake]


STEP, END = actions.Step(clock=0), actions.Exit(code=0, text='done')
WAKE, STOP = events.Wake(), events.Stop(reason='x')


def test_a_turn_is_on_the_tape_before_its_actions_are_carried_out():
  ports = Ports()
  assert run(Script([STEP], [END]), ports, WAKE, STOP, tape=ports) == END
  assert ports.asked == [(0, WAKE, [STEP]), ('work', STEP), (0, STOP, [END])]


@pytest.mark.parametrize('has_tape, words', [(1, 'It is on the tape X.'), (0, 'There is no tape.')])
def test_a_machine_that_raises_names_its_tape(has_tape: int, words: str):
  ports, error = Ports(), KeyError('l7')
  with pytest.raises(loop.MachineCrash) as raised:
    run(Script([STEP], error), ports, WAKE, STOP, tape=ports if has_tape else None)
  assert str(raised.value) == (f"the machine raised KeyError: 'l7', on Stop(reason='x'). {words}")
  assert raised.value.__cause__ is error
  assert (ports.asked[-1] == (0, STOP, error)) == bool(has_tape)


class Answers:
  """Work that answers at once: every value is 7, every payload the same bytes."""

  def __init__(self, post: Any, payloads: payloads_lib.PayloadStore):
    self._post, self._payloads = post, payloads
    self.steps = 0

  def submit(self, action: actions.Work) -> None:
    match action:
      case actions.Step():
        self.steps += 1
        self._post(events.StepDone(tokens=5, step_ns=1))
      case actions.Encode(sync=sync, fragment=p):
        payload_id = self._payloads.put(PAYLOAD)
        self._post(events.Encoded(sync=sync, fragment=p, payload_id=payload_id, payload=ANNOUNCED))
      case actions.Adopt(fragment=p, version=version, payload_id=payload_id):
        self._payloads.drop(payload_id)
        self._post(events.AdoptDone(fragment=p, version=version, digest=7))
      case actions.Merge(sync=sync, fragment=p, participants=participants):
        for participant in participants:
          self._payloads.drop(participant.payload_id)
        delta = {'payload_id': self._payloads.put(PAYLOAD), 'payload': ANNOUNCED, 'digest': 7}
        self._post(events.MergeDone(sync=sync, fragment=p, **delta))
      case actions.Save(clock=step):
        self._post(events.SaveDone(clock=step))


class Quiet:
  """Records that keep the last ledger."""

  ledger: facts.Ledger | None = None

  def report(self, fact: facts.Fact) -> None:
    if isinstance(fact, facts.Ledger):
      self.ledger = fact

  def say(self, text: str) -> None:
    pass


def test_a_run_over_real_threads_and_transports_ends():
  config = config_lib.ProtocolConfig(
    learners=2, fragments=2, period=2, overlap=0, quorum=2, total_steps=6
  )
  hub, exits, records = in_process.InProcessHub(), queue.SimpleQueue(), Quiet()
  works: list[Answers] = []
  stores: list[payloads_lib.PayloadStore] = []

  def serve(machine: Any, make_transport: Any) -> None:
    event_queue, payloads = loop.EventQueue(), payloads_lib.PayloadStore()
    transport = make_transport(event_queue.post, payloads)
    work = Answers(event_queue.post, payloads)
    works.append(work)
    stores.append(payloads)
    node = loop.Node(machine, event_queue, loop.Monotonic(), transport, work, payloads, records)
    event_queue.post(events.Wake())
    threading.Thread(target=lambda: exits.put(node.run()), daemon=True).start()

  serve(
    syncer_machine.SyncerMachine(config, AGREEMENT, 'r0', (7, 7), (64, 64)), hub.syncer_transport
  )
  for n in range(2):
    identity = learner_machine.Identity(
      learner=f'l{n}', nonce=n, agreement=AGREEMENT, host='here', pid=n, seed=n
    )
    serve(learner_machine.LearnerMachine(config, identity, (7, 7)), hub.learner_transport)
  assert [exits.get(timeout=DEADLINE_S).code for _ in range(3)] == [0, 0, 0]
  assert [len(store) for store in stores] == [0, 0, 0], 'some payloads were not dropped'
  assert [work.steps for work in works] == [0, 6, 6]
  assert records.ledger.merged == records.ledger.trained * 2 == 120
