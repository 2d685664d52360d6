"""Predicts the goodput of a run from the times of a real one.

    python -m experiments.goodput.predict --like=runs/a --against=runs/b   # b from the times of a
    python -m experiments.goodput.predict --like=runs/a --kill_every_s=60  # a, with more kills

The times of everything come from the tapes of run --like (calibration.py), and the machines run as
in that run, or in the one of --against, with its kills of learners. Prints, in percent, the figures
of the simulation and, without --kill_every_s, the measured ones.
"""

import pathlib

from absl import app, flags

from diloco_jax.protocol.tape import tape as tape_lib
from experiments.goodput import calibration, tape_times

_LIKE = flags.DEFINE_string('like', None, 'The folder of a real run, whose times are simulated.')
_AGAINST = flags.DEFINE_string('against', '', 'The folder of the run to predict; default: --like.')
_KILL_EVERY_S = flags.DEFINE_float(
  'kill_every_s', None, 'Kill each learner so often instead, at random.', 0.1
)
_DOWN_S = flags.DEFINE_float(
  'down_s', 8.0, 'With --kill_every_s: until its next process starts.', lower_bound=0.0
)
_SEED = flags.DEFINE_integer('seed', 0, 'With --kill_every_s: of the kills.')
_PREDICTIONS = 4  # whose mean is printed


def main(argv: list[str]) -> None:
  if argv[1:]:
    raise app.UsageError(f'unexpected words: {" ".join(argv[1:])}')
  like = pathlib.Path(_LIKE.value)
  against = pathlib.Path(_AGAINST.value or like)
  try:
    source = tape_times.read(like)
    target = source if against == like else tape_times.read(against)
  except (ValueError, tape_lib.TapeError) as error:
    raise app.UsageError(str(error)) from error
  kills, columns = target.kills, {}
  if _KILL_EVERY_S.value is None:
    columns['measured'] = [calibration.outcome(against, target)]
  else:
    kills = calibration.drawn_kills(
      target.config, _KILL_EVERY_S.value, _DOWN_S.value, target.length_ns, _SEED.value
    )
  columns['simulated'] = [
    calibration.predict(source, target.config, kills, target.length_ns, seed)
    for seed in range(_PREDICTIONS)
  ]
  print(f'{target.length_ns / 1e9:.0f} s, {len(kills)} kills, in percent:')
  print(calibration.text(columns))


if __name__ == '__main__':
  flags.mark_flag_as_required('like')
  app.run(main)
