r"""Starts a run on an engine: on this machine, on a cluster, or as text for another system.

    diloco launch --config=stdlib_lm:tiny --workdir=runs/x          # as diloco train
    diloco launch --engine=gke --config=gemma:1b --topology=v6e:4x4 \
      --tls=certs --out=manifests

    # A part of a run: a syncer here, and learners elsewhere that dial it.
    diloco launch --config=stdlib_lm:tiny --workdir=runs/x --only=syncer --listen=0.0.0.0:7070 \
      --tls=certs
    diloco launch --config=stdlib_lm:tiny --workdir=runs/x --only=l0,l1 --syncer=HOST:7070 \
      --tls=certs

docs/howto/launch.md has a section for each engine. Exit codes of every program, on every engine: 0
done; 42 never started again; anything else started again.
"""

import pathlib
import types

from absl import flags

from diloco_jax.certs import allowlist, names, proofs
from diloco_jax.certs import check as check_lib
from diloco_jax.launch import cli
from diloco_jax.launch import spec as spec_lib
from diloco_jax.launch.engines import gke, local, ray, slurm, systemd
from diloco_jax.process import exits

_ENGINES: dict[str, types.ModuleType] = {
  engine.__name__.rpartition('.')[2]: engine for engine in (gke, local, ray, slurm, systemd)
}
_ENGINE = flags.DEFINE_enum('engine', 'local', sorted(_ENGINES), 'What runs the programs.')
_WORKDIR = flags.DEFINE_string(
  'workdir', '', 'The folder of the run on the machines of its programs; each engine has a default.'
)
_TLS = flags.DEFINE_string(
  'tls', '', 'The folder that `diloco certs` made for all programs, or for one of them.'
)
_SYNCER = flags.DEFINE_string(
  'syncer', '', 'The HOST:PORT of a syncer that runs elsewhere; only learners are started.'
)
_PORT = flags.DEFINE_integer(
  'port', None, 'slurm: the port of the syncer; without it one that is free.', 1, 65535
)
_LOOP = flags.DEFINE_string(
  'loop',
  '',
  'With --config=own_loop: the command of each learner, as "python my_loop.py --learner={learner} '
  '--syncer={syncer} --workdir={workdir} --tls={tls}".',
)
_ONLY = flags.DEFINE_list('only', [], 'The programs to start, as syncer,l0; without it all are.')
_NAME = flags.DEFINE_string('name', '', 'The name of the run; the default is that of the config.')
_TOPOLOGY = flags.DEFINE_string(
  'topology', '', 'The TPU slice of each learner, as v6e:4x4; with cpu it is mesh.hosts machines.'
)
_DISK_GIB = flags.DEFINE_integer('disk_gib', 200, "The size of the syncer's persistent disk.")
_OUT = flags.DEFINE_string(
  'out', '', 'The folder for the texts of an engine that runs nothing; else they are printed.'
)
cli.define_config()
for _engine in _ENGINES.values():
  flags.adopt_module_key_flags(_engine)


def main(argv: list[str]) -> int:
  del argv
  request = spec_lib.Request(
    config=cli.config(),
    config_flags=cli.config_flags_of_this_process(),
    name=_NAME.value,
    workdir=_WORKDIR.value,
    tls=_TLS.value,
    topology=_TOPOLOGY.value,
    syncer=_SYNCER.value,
    loop=_LOOP.value,
    port=_PORT.value,
    only=_ONLY.value,
    disk_gib=_DISK_GIB.value,
  )
  engine = _ENGINES[_ENGINE.value]
  _refuse_flags_of_others()
  with exits.never_retry():
    choices = engine.choose(request)
    described = spec_lib.make(request, choices)
    needs = engine.needs(described, request) if hasattr(engine, 'needs') else {}
  missing = [text for text, is_met in needs.items() if not is_met]
  missing += _wrong_certificates(described)
  if missing:
    text = f'--engine={_ENGINE.value} needs {"; ".join(missing)}'
    raise exits.NeverRetry(f'{text}. Nothing was written or started')
  if hasattr(engine, 'run'):
    return engine.run(described, request, choices)
  with exits.never_retry():
    texts = engine.render(described, request, choices)
  for name, text in texts.items():
    if _OUT.value:
      _write(pathlib.Path(_OUT.value) / name, text)
    else:
      print(f'# {name}\n{text}')
  return 0


def _wrong_certificates(described: spec_lib.Spec) -> list[str]:
  """What is wrong with those of the programs. The syncer has to list those of the learners."""
  tls, wrong, now = pathlib.Path(_TLS.value), [], proofs.utc_now()
  syncer = tls / names.SYNCER
  for program in described.programs if _TLS.value else ():
    folder = check_lib.folder(tls, program.name)
    try:
      proof = check_lib.read(folder, program.role, now).proof
      listed = allowlist.read(syncer) if syncer.is_dir() else None  # else it is elsewhere
      if program.role == names.LEARNER:
        check_lib.require_learner(folder, program.name, now)
        if listed:
          listed.require(proof)
    except ValueError as error:
      wrong.append(str(error))
  return wrong


def _refuse_flags_of_others() -> None:
  """A flag that the chosen engine does not read would do nothing."""
  of = flags.FLAGS.get_key_flags_for_module
  writing = [name for name, engine in _ENGINES.items() if not hasattr(engine, 'run')]
  own = {'disk_gib': ['gke'], 'port': ['slurm'], 'out': writing}
  for flag in of(__name__):
    all_readers = [name for name, engine in _ENGINES.items() if flag in of(engine)]
    readers = own.get(flag.name, all_readers)
    if flag.present and readers and _ENGINE.value not in readers:
      raise exits.NeverRetry(
        f'--{flag.name} applies to --engine={"|".join(readers)} only, and this is '
        f'--engine={_ENGINE.value}'
      )


def _write(path: pathlib.Path, text: str) -> None:
  try:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, 'utf-8')
  except OSError as error:
    text = f'cannot write {path} ({error.strerror}); make space, or choose another --out'
    raise exits.refusal(error)(text) from error
  print(f'wrote {path}')
