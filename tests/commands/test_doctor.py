"""`diloco doctor`: every check says what it found, or what is wrong and the remedy, in one line."""

import os
import pathlib
import subprocess
import sys

import pytest

from diloco_jax.commands import doctor
from diloco_jax.launch import accelerators
from diloco_jax.storage import folders

ROOT = pathlib.Path(__file__).parents[2]


def test_a_machine_that_runs_the_tests_is_well(tmp_path):
  done = subprocess.run(
    [sys.executable, '-m', 'diloco_jax', 'doctor', f'--workdir={tmp_path}/a/b'],
    cwd=ROOT,
    text=True,
    stdout=subprocess.PIPE,
    check=False,
  )
  *lines, verdict = done.stdout.splitlines()
  # A busy machine may have too little memory or disk at this moment.
  others = [line for line in lines if line.split()[1] not in ('memory', 'disk')]
  assert len(lines) == 11 and all(line.startswith('ok ') for line in others), done.stdout
  bad = sum(line.startswith('BAD') for line in lines)
  assert (done.returncode, verdict == 'all is well') == (int(bad > 0), not bad)
  assert not (tmp_path / 'a').exists()


@pytest.mark.parametrize(
  'check, remedy',
  [
    (lambda: doctor.python((3, 9, 1)), 'install Python 3.11 or newer'),
    (lambda: doctor.packages(['numpy', 'no-such-package']), 'pip install no-such-package'),
    (lambda: doctor.packages(['numpy>=99']), "pip install 'numpy>=99'"),
    (lambda: doctor.settings({'JAX_DISABLE_JIT': '1'}), 'unset JAX_DISABLE_JIT'),
    (lambda: doctor.memory(1 << 30), 'run fewer learners'),
    (lambda: doctor.open_files(256), 'ulimit -n 4096'),
    (lambda: doctor.ports('192.0.2.1'), 'allow it in the firewall'),
    (lambda: doctor.disk(pathlib.Path('/proc/x')), 'choose another --workdir'),
  ],
)
def test_what_would_not_work_has_a_remedy(check, remedy, capsys):
  assert doctor.report({'one': check, 'two': lambda: 'fine'}) == 1
  bad, fine, verdict = capsys.readouterr().out.splitlines()
  assert bad.startswith('BAD  one  ') and remedy in bad
  assert (fine, verdict) == ('ok   two  fine', '1 of 2 checks failed')


def test_a_container_may_have_less_memory_than_its_host(tmp_path):
  host = accelerators.available_memory(tmp_path)
  (tmp_path / 'memory.current').write_text('1000\n')
  for limit, available in (('max\n', host), ('5000\n', 4000)):
    (tmp_path / 'memory.max').write_text(limit)
    assert accelerators.available_memory(tmp_path) == pytest.approx(available, rel=0.2)


@pytest.mark.parametrize(
  'name, value',
  [
    ('JAX_ENABLE_X64', '1'),
    ('JAX_DEBUG_NANS', 'true'),
    ('XLA_FLAGS', '--xla_force_host_platform_device_count=8'),
    ('JAX_DISABLE_JIT', '0'),
  ],
)
def test_a_setting_that_works_is_not_bad(name, value):
  assert f'{name}={value}' in doctor.settings({name: value})


def test_a_cache_that_cannot_be_written(monkeypatch):
  monkeypatch.setenv('JAX_COMPILATION_CACHE_DIR', '/proc/cache')
  with pytest.raises(doctor.Bad, match='set JAX_COMPILATION_CACHE_DIR'):
    doctor.cache()


def test_it_says_where_the_caches_of_a_user_without_a_home_are(monkeypatch, tmp_path):
  monkeypatch.delenv('XDG_CACHE_HOME', raising=False)
  assert 'no home' not in doctor.cache()
  monkeypatch.setattr(folders.tempfile, 'gettempdir', lambda: str(tmp_path))
  monkeypatch.setenv('HOME', str(tmp_path / 'gone'))
  there = tmp_path / f'diloco_jax-{os.getuid()}'
  assert f'{there}, as this user has no home' in doctor.cache()


def test_a_device_that_jax_cannot_find_is_no_traceback():
  done = subprocess.run(
    [sys.executable, '-m', 'diloco_jax', 'doctor'],
    cwd=ROOT,
    env={**os.environ, 'JAX_PLATFORMS': 'cuda'},
    text=True,
    capture_output=True,
    check=False,
  )
  assert done.returncode == 1 and 'Traceback' not in done.stderr
  (line,) = [line for line in done.stdout.splitlines() if 'devices ' in line[:16]]
  assert line.startswith('BAD') and 'unset JAX_PLATFORMS=cuda' in line


@pytest.mark.parametrize(
  'setting, remedy',
  [
    ({'JAX_PLATFORMS': 'cuda'}, 'unset JAX_PLATFORMS=cuda'),
    ({'JAX_PLATFORMS': 'cpu', 'JAX_DISABLE_JIT': '1'}, 'unset JAX_DISABLE_JIT'),
  ],
)
def test_a_learner_says_what_doctor_says_and_is_not_started_again(setting, remedy, tmp_path):
  words = ['--config=stdlib_lm:tiny', f'--workdir={tmp_path}/run', '--learner=l0']
  done = subprocess.run(
    [sys.executable, '-m', 'diloco_jax', 'learner', *words, '--syncer=none'],
    cwd=ROOT,
    env={**os.environ, **setting},
    text=True,
    capture_output=True,
    check=False,
  )
  errors = [line for line in done.stderr.splitlines() if line.startswith('error: ')]
  assert done.returncode == 42 and remedy in errors[0] and 'Traceback' not in done.stderr
  assert not (tmp_path / 'run').exists()
