"""Reads the newest version of a model in a folder, again and again, as a sampler would.

python reads_versions.py OUT STOP LIBRARY MODEL

It reads MODEL, as the first time takes long, and prints a line. Then it prints one for each version
that was whole, until the file STOP exists, and ends with an error at the first that is not. LIBRARY
is safetensors, or transformers, which needs PyTorch and nothing of this project
(tests/storage/hugging_face/reference.py).
"""

import hashlib
import json
import pathlib
import sys


def files_are_whole(folder: pathlib.Path, files: list) -> None:
  for name, size, digest in files:
    data = (folder / name).read_bytes()
    assert (len(data), hashlib.sha256(data).hexdigest()) == (size, digest), folder / name


def read(folder: pathlib.Path, library: str) -> None:
  if library == 'transformers':
    import transformers

    transformers.utils.logging.disable_progress_bar()
    _, loading = transformers.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(loading.values()), (folder, loading)
    assert transformers.AutoTokenizer.from_pretrained(folder)('def add')['input_ids']
  else:
    import safetensors.numpy

    config = json.loads((folder / 'config.json').read_text('utf-8'))
    files = sorted(folder.glob('*.safetensors'))
    loading = {name for file in files for name in safetensors.numpy.load_file(file)}
    assert len(loading) == 3 + 9 * config['num_hidden_layers'], (folder, sorted(loading))
    assert json.loads((folder / 'tokenizer.json').read_text('utf-8'))['model']


def main(out: str, stop: str, library: str, model: str) -> None:
  read(pathlib.Path(model), library)
  print('ready', flush=True)
  while not pathlib.Path(stop).exists():
    latest = pathlib.Path(out, 'latest')
    if latest.is_symlink():
      folder = latest.resolve(strict=True)
      read(folder, library)
      manifest = json.loads((folder / 'manifest.json').read_text('utf-8'))['manifest']
      files_are_whole(folder, manifest['files'])
      index = json.loads(pathlib.Path(out, 'index.json').read_text('utf-8'))
      files_are_whole(pathlib.Path(out, index['path']), index['files'])
      print(manifest['record']['version'], flush=True)


if __name__ == '__main__':
  main(*sys.argv[1:])
