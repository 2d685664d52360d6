"""Writes a trained model for other programs: as one *.safetensors file, or as a folder.

    diloco export --workdir=runs/x --out=m.safetensors
    diloco train --config.train.init_from=m.safetensors    # begins with it
    diloco export --workdir=runs/x --out=FOLDER    # of a run that began with a Hugging Face folder
    diloco export --workdir=runs/x --out=VERSIONS --follow --every_s=60 --keep=3

A folder is like the one that the run began with (storage/hugging_face.py), LoRA merged. In a file
names are paths in the tree of the parameters, 'layers/3/query'; the metadata has the config. Of
those that are never sent the frozen ones are in the file. A run under way gives its newest
checkpoint.

--follow writes such a folder for each newest model until the run has ended. Once it is verified and
on the disk, VERSIONS/latest, a symbolic link, and VERSIONS/index.json name it. It is removed --keep
versions later. Where the disk is full, a version is left out, with a line.

Needs the extra [data]. Exit codes: 0 done, 42 there is no such run, no model yet, nobody may follow
it, or the file cannot be written; 75 no syncer answers.
"""

import json
import pathlib
import time
from collections.abc import Callable, Iterable
from typing import Any

from absl import flags

from diloco_jax.launch import cli
from diloco_jax.process import exits
from diloco_jax.storage import files as files_lib

_WORKDIR = flags.DEFINE_string('workdir', None, cli.TO_READ)
_OUT = flags.DEFINE_string('out', None, 'Write this *.safetensors or folder.', required=True)
_EVERY_S = flags.DEFINE_float(
  'every_s', 60.0, 'With --follow: write one version in so many seconds.', 0, 1e6
)
_KEEP = flags.DEFINE_integer('keep', 3, 'With --follow: keep so many versions.', 2)
cli.define_follow()


def main(argv: list[str]) -> int:
  del argv
  with cli.reading_a_model():  # after the flags are checked
    import jax

    from diloco_jax.api import follow, load_params
    from diloco_jax.config import brought, load
    from diloco_jax.storage import arrays, hugging_face

  out, absent, follows = pathlib.Path(_OUT.value), 0, cli.follow_flags()
  errors = *load_params.ERRORS, OSError, files_lib.DirectoryError
  with exits.never_retry(*errors), load_params.local(_WORKDIR.value) as folder:
    assembled = load_params.assemble(folder)
    if out.suffix == '.safetensors' and not follows[0]:
      params = load_params.load_params(folder)
      absent = len(arrays.by_name(assembled.shapes)) - len(arrays.by_name(params))
      arrays.export(out, params, {'config': json.dumps(assembled.config.to_dict())})
    else:
      begun, export = assembled.config.train.init_from, assembled.task and assembled.task.export
      if out.suffix == '.safetensors' or not export or not hugging_face.is_model(begun):
        raise ValueError(
          f'{out}: a folder needs the Hugging Face folder in train.init_from, {begun!r}; any other '
          'model is exported to a file, --out=NAME.safetensors'
        )
      begun_with = load.brought(folder)

      def write(folder: pathlib.Path, params: Any) -> None:
        things = brought.things(assembled.config, assembled.task)  # as they are now
        brought.require(begun_with, things, [brought.MODEL])
        # In float32, so that an adapter is added, and the sum is rounded, once: by the last call.
        wide = jax.tree.map(lambda leaf: leaf.astype('float32'), params)
        hugging_face.write(folder, export(wide), pathlib.Path(begun))

      models = follow.models(folder, _WORKDIR.value or '', *follows)
      if follows[0]:
        _write_each(out, models, write)
        return 0
      write(out, next(models)[-1])
      out /= hugging_face.FILE
  without = f', without {absent} parameters that never leave a learner' if absent else ''
  print(f'{out}: {out.stat().st_size:,} bytes{without}')
  return 0


def _write_each(out: pathlib.Path, models: Iterable, write: Callable) -> None:
  """Writes versions side by side until the run has ended, at most one in --every_s."""
  from diloco_jax.api import versions

  folder = versions.Versions(out, _KEEP.value)  # which it has until its end
  for version, heading, params in models:
    began_s = time.monotonic()
    try:
      print(f'{heading}{folder.add(version, lambda new: write(new, params))}', flush=True)
    except OSError as error:
      if exits.refusal(error) is not exits.DiskFailed:
        raise
      end = f'{out / versions.LATEST} is what it was; the next version is tried'
      print(f'{heading}not written: {exits.one_line(error)}. {end}', flush=True)
    time.sleep(max(0.0, began_s + _EVERY_S.value - time.monotonic()))
