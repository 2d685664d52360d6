"""A learner dispatches a step ahead: its devices compute meanwhile, as accelerators do."""

import json

from tests.launch.lib import command_line

_AHEAD = """
import contextlib, json, pathlib, sys, time
import jax, numpy as np
from diloco_jax.config import build
from diloco_jax.configs import stdlib_lm
from diloco_jax.process import lifecycle
from diloco_jax.learner import on_device, work
from diloco_jax.learner import node as learner_node
from diloco_jax.protocol import actions, events
from diloco_jax.report import records
from diloco_jax.transport import payloads

STEPS, SAVED = 8, 4
lifecycle.prepare_jax(1, ahead=True)
config = stdlib_lm.get_config('tiny')
config.mesh.data, config.train.steps, config.optimizer.warmup_steps = 1, STEPS, 2
config.sync.fragments, config.sync.overlap = 2, 0  # in lock step, too
config.data.batch_size = 64  # a step is longer than what the host does in between
assembled, folder = build.assemble(config), pathlib.Path(sys.argv[1])
assert assembled.protocol.lag == 0
layout = assembled.layout
delta = lambda p: memoryview(bytes(assembled.codec_down.encoded_size(layout.size(p))))

def bits(made):
  return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(made.state)]

fast = learner_node.make_island(assembled, folder, 'l0', jax.devices()[:1])
fast.warm_up()
slow, functions = fast.twin(), {}
exchange = on_device.Exchange(assembled, slow, functions).begin()
losses = []
for k in range(STEPS):
  losses.append(slow.step(k).loss)
  p = k % layout.num_fragments
  exchange.encode(p)
  exchange.adopt(p, delta(p), whole=False, keep=True, merged=True)

store, posted = payloads.PayloadStore(), []
with contextlib.closing(records.Recorder(folder, 'l0', tensorboard=False)) as recorder:
  post = lambda event: posted.append((event, fast.must_finish(0) and not fast.must_finish(1)))
  exchange = on_device.Exchange(assembled, fast, functions).begin()
  learner = work.LearnerWork(assembled, fast, post, None, store, recorder, exchange)
  for k in range(STEPS):
    learner.submit(actions.Step(clock=k))
    p = k % layout.num_fragments
    learner.submit(actions.Encode(sync=k, fragment=p))
    adopt = {'version': k, 'payload_id': store.put(delta(p)), 'whole': False}
    learner.submit(actions.Adopt(fragment=p, keep=True, merged=True, **adopt))
    if k + 1 == SAVED:
      learner.submit(actions.Save(clock=SAVED, machine_state={'at': SAVED}))
  learner.stop()
  begun_s = time.monotonic()
  learner.run()
  wall_s = time.monotonic() - begun_s
done = [(event.step_ns, running) for event, running in posted if type(event) is events.StepDone]
assert bits(fast) == bits(slow)
fast.close()
restored = learner_node.make_island(assembled, folder, 'l0', jax.devices()[:1]).restore()
steps = [fact for _, fact in records.TailAll(folder).read() if fact['name'] == 'step']
print(json.dumps({
  'wall_s': wall_s, 'done': done, 'same': losses == [fact['loss'] for fact in steps],
  'clocks': [fact['step'] for fact in steps], 'seconds': [fact['seconds'] for fact in steps],
  'data_s': [fact['data_s'] for fact in steps], 'restored': [restored.step, restored.data_state],
}))
"""


def test_a_step_is_dispatched_before_the_one_before_is_read_and_changes_no_bit(tmp_path):
  """StepDone says that a step is dispatched and the one before complete. Times are those of the
  devices, which wait for no batch after the first; a save has the steps before it."""
  ended = command_line.python('-c', _AHEAD, tmp_path, JAX_NUM_CPU_DEVICES='1')
  assert ended.returncode == 0, ended.stderr
  printed = json.loads(ended.stdout.splitlines()[-1])
  assert printed['same'] and printed['clocks'] == list(range(1, 9))
  assert printed['restored'] == [4, 4]
  times_ns, running = zip(*printed['done'])
  assert len(times_ns) == 8 and times_ns[0] == 0 and not running[-1]
  assert any(running), printed  # how many depends on the load of this machine
  assert times_ns[1] == int(printed['seconds'][0] * 1e9)
  assert sum(printed['seconds']) <= printed['wall_s']
  assert sum(printed['data_s']) < 0.2 * sum(printed['seconds'])
