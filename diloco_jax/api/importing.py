"""How the public names are imported in a notebook, where a cell may be interrupted at any moment
and packages may be replaced. An import of jax that ends in the middle cannot be made up for in the
same process."""

import contextlib
import importlib.metadata
import signal
import sys
import threading
import warnings
from collections.abc import Iterator


@contextlib.contextmanager
def uninterrupted() -> Iterator[None]:
  """An interrupt of the body is raised at its end, a second one at once."""
  before = signal.getsignal(signal.SIGINT)
  if threading.current_thread() is not threading.main_thread() or not callable(before):
    yield
    return
  came = []

  def remember(*about: object) -> None:
    came.append(about)
    signal.signal(signal.SIGINT, before)

  signal.signal(signal.SIGINT, remember)
  try:
    yield
  finally:
    signal.signal(signal.SIGINT, before)
    if came:
      before(*came[0])


@contextlib.contextmanager
def whole() -> Iterator[None]:
  """Lets the imports of the body end; warns of a jax that was imported before another one was
  installed."""
  imported = getattr(sys.modules.get('jax'), '__version__', None)
  if imported and imported != (installed := importlib.metadata.version('jax')):
    warnings.warn(
      f'jax {imported} was imported before jax {installed} was installed: restart the kernel '
      '(in Colab: Runtime, Restart session)',
      stacklevel=4,
    )
  with uninterrupted():
    yield
