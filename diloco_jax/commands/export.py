"""Writes a trained model for other programs: as one *.safetensors file, or as a folder.

    diloco export --workdir=runs/x --out=m.safetensors
    diloco train --config.train.init_from=m.safetensors    # begins with it
    diloco export --workdir=runs/x --out=FOLDER    # of a run that began with a Hugging Face folder

A folder is like the one that the run began with (storage/hugging_face.py), LoRA merged. In a file
names are paths in the tree of the parameters, 'layers/3/query'; the metadata has the config. Of
those that are never sent the frozen ones are in the file. A run under way gives its newest
checkpoint. Needs the extra [data]. Exit codes: 0 done, 42 there is no such run, no model yet, or
the file cannot be written.
"""

import json
import pathlib

from absl import flags

from diloco_jax.launch import cli
from diloco_jax.nodes import exits

_WORKDIR = flags.DEFINE_string('workdir', None, cli.TO_READ)
_OUT = flags.DEFINE_string('out', None, 'Write this *.safetensors or folder.', required=True)


def main(argv: list[str]) -> int:
  del argv
  with cli.reading_a_model():  # after the flags are checked
    import jax

    from diloco_jax.api import load_params
    from diloco_jax.config import brought, load
    from diloco_jax.storage import arrays, hugging_face

  out, absent = pathlib.Path(_OUT.value), 0
  with exits.never_retry(*load_params.ERRORS, OSError), load_params.local(_WORKDIR.value) as folder:
    assembled = load_params.assemble(folder)
    if out.suffix == '.safetensors':
      params = load_params.load_params(folder)
      absent = len(arrays.by_name(assembled.shapes)) - len(arrays.by_name(params))
      arrays.export(out, params, {'config': json.dumps(assembled.config.to_dict())})
    else:
      begun, export = assembled.config.train.init_from, assembled.task and assembled.task.export
      if not export or not hugging_face.is_model(begun):
        raise ValueError(
          f'{out}: a folder needs the Hugging Face folder in train.init_from, {begun!r}; any other '
          'model is exported to a file, --out=NAME.safetensors'
        )
      brought.require(load.brought(folder), assembled.things, [brought.MODEL])
      # So that an adapter is added, and the sum is rounded, once: by `write`.
      wide = jax.tree.map(lambda leaf: leaf.astype('float32'), load_params.load_all(folder))
      hugging_face.write(out, export(wide), pathlib.Path(begun))
      out /= hugging_face.FILE
  without = f', without {absent} parameters that never leave a learner' if absent else ''
  print(f'{out}: {out.stat().st_size:,} bytes{without}')
  return 0
