"""The node of a learner: threads, island and payloads around its machine.

Where is ...?
  how a fragment is encoded and adopted on devices: on_device.py `encode`, `adopt`
  how the bytes of a fragment travel: carriers.py
  what the hosts of a learner agree on, and how: hosts.py
  whose moments a new process takes: moments.py
  where a learner is stuck, and how its process ends then: stuck.py
  TFLOP/s, MFU, memory of devices: work.py `record_step`, train/flops.py
"""
