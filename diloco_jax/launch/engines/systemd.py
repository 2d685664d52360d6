"""The engine of machines with systemd: it writes a unit for each program, and starts nothing.

Enabled units start at boot. systemd starts a program again after every end but 0, 42 and
`systemctl stop`, and stops to do so after five processes in a row that lived for less than 20 s.
"""

import dataclasses
import getpass
import os
import shutil

from absl import flags

from diloco_jax.launch import cli
from diloco_jax.launch import spec as spec_lib
from diloco_jax.launch.engines import local
from diloco_jax.process import exits, restarts

_PAUSE_S = 5

flags.declare_key_flag('listen')


def choose(request: spec_lib.Request) -> spec_lib.Choices:
  if request.tpus or request.config.mesh.hosts > 1:
    raise ValueError('--engine=systemd: a unit is one program of one machine; see --engine=gke')
  return local.choose(dataclasses.replace(request, topology=''))


def needs(described: spec_lib.Spec, request: spec_lib.Request) -> dict[str, object]:
  del described
  return {'--workdir=FOLDER': request.workdir}


def render(
  described: spec_lib.Spec, request: spec_lib.Request, choices: spec_lib.Choices
) -> dict[str, str]:
  del choices
  texts = {}
  names = [f'{described.name}-{program.name}.service' for program in described.programs]
  for name, program in zip(names, described.programs):
    command = spec_lib.command(program, cli.PROGRAM)
    environment = dict(program.environment)
    if request.topology == spec_lib.CPU or program.role == spec_lib.SYNCER:
      environment['JAX_PLATFORMS'] = 'cpu'
    words = {
      'names': ' '.join(names),
      'about': f'{program.name} of the run {described.name}',
      'user': getpass.getuser(),
      'cwd': os.getcwd().replace('%', '%%'),
      'command': ' '.join(map(_quote, [shutil.which(command[0]) or command[0], *command[1:]])),
      'environment': ' '.join(_quote(f'{key}={value}') for key, value in environment.items()),
      'never': exits.NEVER_RETRY,
      'pause_s': _PAUSE_S,
      'starts': restarts.MAX_SHORT_PROCESSES,
      'within_s': int(restarts.MAX_SHORT_PROCESSES * (restarts.SHORT_S + _PAUSE_S)),
      'stop_s': request.stop_s,
    }
    texts[name] = _UNIT % words
  return texts


def _quote(word: str) -> str:
  """A word of a command or of an environment, as systemd reads it."""
  escaped = word.replace('\\', '\\\\').replace('"', '\\"').replace('%', '%%').replace('$', '$$')
  return f'"{escaped}"'


_UNIT = """\
# sudo cp %(names)s /etc/systemd/system && sudo systemctl daemon-reload
# sudo systemctl enable --now %(names)s   # now, and at each boot
# journalctl --follow --unit=...          # what it prints
[Unit]
Description=diloco: %(about)s
Wants=network-online.target
After=network-online.target
StartLimitIntervalSec=%(within_s)s
StartLimitBurst=%(starts)s

[Service]
Type=exec
User=%(user)s
UMask=0077
WorkingDirectory=%(cwd)s
Environment=%(environment)s
ExecStart=%(command)s
Restart=on-failure
RestartPreventExitStatus=%(never)s
RestartSec=%(pause_s)s
KillMode=mixed
TimeoutStopSec=%(stop_s)s

[Install]
WantedBy=multi-user.target
"""
