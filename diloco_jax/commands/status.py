"""Shows a run in the browser: one that trains, one that has ended, or a copy of its folder.

    diloco status                              # of the newest run in ./runs
    diloco status --workdir=runs/x             # prints the address of the page
    diloco status --workdir=runs/x --port=8080 --open

Below the address it prints what is wrong with the run now, if anything is. The page is served on
127.0.0.1 alone, and nothing on it acts on the run; from another machine: ssh -L
8080:127.0.0.1:8080 HOST. /metrics is for Prometheus, /run.json for programs. Exit codes: 0 after
Ctrl-C, 42 there is no run in the folder, or the port is in use.
"""

import contextlib
import errno
import threading
import time
import webbrowser

from absl import flags

from diloco_jax.process import exits
from diloco_jax.report import folder as folder_lib
from diloco_jax.report import header, serve

_WORKDIR = flags.DEFINE_string('workdir', None, 'The folder of the run; else the newest in ./runs.')
_PORT = flags.DEFINE_integer('port', 0, 'The port on 127.0.0.1; 0 is any that is free.', 0, 65535)
_OPEN = flags.DEFINE_bool('open', False, 'Whether to open the page in the browser.')
_PAUSE_S = 0.5  # between two looks at whether all records have been read


def main(argv: list[str]) -> int:
  del argv
  with exits.never_retry(ValueError, OSError):
    workdir = folder_lib.choose(_WORKDIR.value)
    try:
      server, url = serve.make(workdir, _PORT.value)
    except OSError as error:
      if error.errno != errno.EADDRINUSE:
        raise
      why = f'port {_PORT.value} is in use: choose another one, or leave --port out for a free one'
      raise ValueError(why) from error
    watch = server.RequestHandlerClass.watch
    watch.state()  # refuses the records of another release
  print(url, flush=True)
  threading.Thread(target=server.serve_forever, name='page', daemon=True).start()
  if _OPEN.value:
    webbrowser.open(url)
  with contextlib.suppress(KeyboardInterrupt):
    while watch.state()['behind']:
      time.sleep(_PAUSE_S)
    for line in watch.state()['notices']:
      header.say(line)
    threading.Event().wait()
  return 0
