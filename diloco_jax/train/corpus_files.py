"""The files of a corpus. Imports no jax, so a run without any text is refused before it begins."""

import glob
import os
import sysconfig

_SKIPPED_DIRECTORIES = frozenset({'__pycache__', 'site-packages', 'dist-packages'})


def list_files(source: str) -> list[tuple[str, str]]:
  """Returns sorted (relative name, path); names use '/' so that hashes agree on every system.

  Raises:
    ValueError: there is no file.
  """
  if source == 'stdlib':
    root, suffix = sysconfig.get_path('stdlib'), '.py'
    paths = _walk(root, suffix)
  elif os.path.isdir(source):
    root, paths = source, _walk(source, '')
  else:
    paths = [p for p in glob.glob(source, recursive=True) if os.path.isfile(p)]
    root = os.path.commonpath([os.path.dirname(os.path.abspath(p)) for p in paths] or ['/'])
  if not paths:
    raise ValueError(
      f"corpus {source!r} has no files: use 'stdlib', a directory that holds "
      'files, or a glob that matches some'
    )
  return sorted((os.path.relpath(p, root).replace(os.sep, '/'), p) for p in paths)


def _walk(root: str, suffix: str) -> list[str]:
  paths = []
  for directory, subdirectories, files in os.walk(root):
    subdirectories[:] = [d for d in subdirectories if d not in _SKIPPED_DIRECTORIES]
    paths += [os.path.join(directory, name) for name in files if name.endswith(suffix)]
  return paths
