"""A network with ::1 and no address of IPv4: a run over TLS, its follower, status, /metrics."""

import os
import subprocess
import sys

import pytest

from scripts import namespaces
from tests import programs

_COMMANDS = 'ip link set lo up; ip addr del 127.0.0.1/8 dev lo; exec "$@"'
_ALONE = ('unshare', '--map-root-user', '--net', 'sh', '-c', _COMMANDS, 'sh')
_RUN = """
import pathlib, subprocess, sys, threading, urllib.request
import numpy as np
import diloco_jax
from diloco_jax.configs import own_loop
from diloco_jax.report import serve

folder = pathlib.Path(sys.argv[1])
diloco = lambda *words: [sys.executable, '-m', 'diloco_jax', *map(str, words)]
owner = folder / 'certs'
subprocess.run(diloco('certs', f'--tls={owner}', 'init', '--name=six'), check=True)
subprocess.run(diloco('certs', f'--tls={owner}', 'issue', 'l0', 'f0'), check=True)
sync = own_loop.get_config().sync
sync.learners = sync.quorum = 1
workdir, followed = folder / 'run', []
run = diloco_jax.run_syncer(
  total_steps=24, sync=sync, listen='[::1]:0', tls=owner / 'syncer', workdir=workdir
)
with run as server:
  with diloco_jax.join(
    {'w': np.ones(8, np.float32)}, learner='l0', syncer=server.address, tls=owner / 'l0', wait_s=60
  ) as peer:
    params = peer.params

    def receive():
      for version, model in diloco_jax.follow(
        server.address, workdir=workdir, tls=owner / 'f0', wait_s=60
      ):
        followed.append((version, model))

    follower = threading.Thread(target=receive)
    follower.start()
    steps = peer.steps()
    for clock in steps:
      params = peer.sync({'w': params['w'] + 1}, tokens=1)
      while clock == 12 and not followed and follower.is_alive():
        follower.join(0.1)
  server.wait(60)
  follower.join()
assert followed[-1][1]['w'].shape == (8,), followed
status = subprocess.Popen(
  diloco('status', f'--workdir={workdir}'), stdout=subprocess.PIPE, text=True
)
address = next(word for line in status.stdout for word in line.split() if 'http' in word)
page = urllib.request.urlopen(address).read()
status.terminate()
port = serve.serve_metrics(None, workdir, 'syncer', 0)
metrics = urllib.request.urlopen(f'http://[::1]:{port}/metrics').status
print('page', b'<html' in page.lower(), 'metrics', metrics, address)
"""


@pytest.mark.long
def test_a_run_where_there_is_no_ipv4(tmp_path):
  alone = () if namespaces.why_not_allowed() else _ALONE  # else on ::1 of this machine's network
  words = *alone, sys.executable, '-c'
  environment = {'PYTHONPATH': str(programs.ROOT), 'JAX_PLATFORMS': 'cpu'}
  ended = subprocess.run(
    [*words, _RUN, tmp_path], capture_output=True, text=True, env={**os.environ, **environment}
  )
  assert ended.returncode == 0, ended.stdout + ended.stderr
  assert f'page True metrics 200 http://{"[::1]" if alone else ""}' in ended.stdout, ended.stdout
