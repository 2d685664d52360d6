"""One island: a mesh, a model, an inner optimizer and a data shard. It also trains alone.

Where is ...?
  what is trained, model, loss, data: task.py
  the reference model: decoder.py, attention.py, experts.py, initial.py
  how text becomes ids, windows, shards; what is held out: tokenizer.py, data.py, corpus_files.py
  how what a user brings is known by its content: fingerprint.py
  the inner step, and the island around it: step.py, island.py
  the inner optimizers and the learning-rate schedule: optimizer.py `schedule`
  how arrays are split over devices: mesh.py, decoder.py `PARTITION`, learner/split.py
  held-out losses, bits per byte, text, the suite of questions: evaluate.py
"""
