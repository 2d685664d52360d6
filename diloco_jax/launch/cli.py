"""How every program of the project starts: its flags and its config. How it ends: process/exits.py.

This module does not import jax, so `--help`, a mistyped flag and the supervisor answer at once.
"""

import contextlib
import difflib
import functools
import gc
import locale
import os
import pathlib
import re
import shlex
import shutil
import sys
import types
from collections.abc import Callable, Iterator
from typing import NoReturn

from absl import app, flags, logging

from diloco_jax.config import fields, load, protocol_sections, run_config
from diloco_jax.process import exits
from diloco_jax.storage import files as files_lib
from diloco_jax.storage import folders
from diloco_jax.transport import addresses

# The help text of --workdir.
TO_READ = 'The folder of the run, or its store, gs://BUCKET/PREFIX too; else the newest in ./runs.'

_NO_INT = r"invalid literal for int\(\) with base \d+: ('.*')"
_ROOT = pathlib.Path(__file__).resolve().parents[2]
EXAMPLES = _ROOT / (
  'experiments/examples' if folders.CHECKOUT else 'diloco_jax/examples'
)  # pyproject.toml

# Starts a program. No module of it is looked for in the folder of the start (-P).
PROGRAM = (sys.executable, '-P', '-X', 'utf8', str(_ROOT / 'diloco_jax' / '__main__.py'))

_OVERRIDE = re.compile(r'--?(?:no)?config\.([^=]+)')


def speak_utf8() -> None:
  """Makes the names of files, and the text in pipes and files, UTF-8 whatever the locale is.
  Characters that a terminal cannot show are replaced."""
  if sys.getfilesystemencoding() != 'utf-8' and 'utf8' not in sys._xoptions:
    os.environ.setdefault('PYTHONIOENCODING', locale.getencoding())  # what the terminal can show
    os.execv(sys.executable, [sys.executable, '-X', 'utf8', *sys.orig_argv[1:]])
  for stream in filter(None, (sys.stdout, sys.stderr)):
    stream.reconfigure(encoding=None if stream.isatty() else 'utf-8', errors='replace')


class _OptionalIntParser(flags.ArgumentParser):
  """Accepts integers and `none`, which absl's integer parser refuses."""

  def parse(self, argument: str | int | None) -> int | None:
    if argument is None or isinstance(argument, int):
      return argument
    if argument.lower() in ('none', 'null', ''):
      return None
    return flags.IntegerParser().parse(argument)


flags.disclaim_key_flags()  # --help lists --config under the program that defines it


class _ConfigParser(flags.ArgumentParser):
  """Loads the config that --config names (config/load.py)."""

  def parse(self, argument: str) -> run_config.Config:
    with exits.never_retry(ValueError, OSError):
      return load.load(argument)

  def flag_type(self) -> str:
    return 'config'


def define_config(without: str = '; without it that of --workdir') -> flags.FlagHolder:
  """Defines --config and, with it, the overrides --config.a.b=value. `without`: for its help, which
  config it is without the flag.

  It has no default here, since a default would be read at import, outside every error handler.
  """
  from ml_collections import config_flags  # here: a loop of the user's own has no flags

  config_flags.register_flag_parser_for_type(protocol_sections.OptionalInt, _OptionalIntParser())
  sys.argv = _with_flag_files(sys.argv)  # config_flags reads them now
  holder = config_flags.DEFINE_config_file(
    'config',
    help_string='The config: FILE.py:VARIANT, NAME:VARIANT of the package (stdlib_lm:cpu), or the '
    f'folder of a run{without}. Set a field by --config.sync.quorum=2.',
  )
  flags.FLAGS['config'].parser = _ConfigParser()
  return holder


def config() -> run_config.Config:
  """Returns the validated config that the flags name. Raises NeverRetry."""
  value = flags.FLAGS['config'].value
  if value is None:
    raise exits.NeverRetry('no --config given; for example --config=stdlib_lm:cpu')
  with exits.never_retry():
    value.validate()
  return value


def define_access() -> None:
  """Defines --tls and --plaintext_loopback."""
  flags.DEFINE_string(
    'tls',
    '',
    'The folder with the certificate of this node, or with a folder of its name (`diloco certs`), '
    'which every address needs that is not a Unix socket.',
  )
  flags.DEFINE_bool(
    'plaintext_loopback',
    False,
    'Use plain TCP on a loopback address, on both sides, for proxies and debugging: every user of '
    'this machine can connect.',
  )


def define_follow() -> None:
  """Defines --follow, and how to reach the syncer."""
  flags.DEFINE_bool('follow', False, 'Take each newest model, until the run has ended.')
  flags.DEFINE_string(
    'syncer',
    '',
    'With --follow: where the syncer listens; without it the folder of the run says so.',
  )
  define_access()
  flags.register_multi_flags_validator(
    ('follow', 'syncer', 'tls', 'plaintext_loopback'),
    lambda given: given['follow'] or not any(given.values()),
    'where the syncer is matters with --follow only',
  )


def follow_flags() -> tuple[bool, str, addresses.Access]:
  """Whether to follow the run, where its syncer is, and how to reach it, by the flags."""
  return flags.FLAGS['follow'].value, flags.FLAGS['syncer'].value, access()


def define_metrics() -> None:
  """Defines --metrics_port."""
  where = 'at every address of this machine; 0 is any free one.'
  flags.DEFINE_integer(
    'metrics_port', None, f'The port of /metrics, for Prometheus, {where}', 0, 65535
  )


def serve_metrics(process: str) -> None:
  """Serves /metrics at --metrics_port; a port that is in use is no reason not to train."""
  if (port := flags.FLAGS['metrics_port'].value) is not None:
    from diloco_jax.report import serve  # only --metrics_port needs it

    try:
      port = serve.serve_metrics(config(), flags.FLAGS['workdir'].value, process, port)
      print(f'/metrics is served at port {port}', flush=True)
    except OSError as error:
      print(f'/metrics is not served, port {port}: {error.strerror}', flush=True)


def access(node: str = '') -> addresses.Access:
  """How this node proves its name, by its flags."""
  given = flags.FLAGS['tls'].value, flags.FLAGS['plaintext_loopback'].value
  return addresses.access(*given, node)


def overrides() -> dict[str, object]:
  """The overrides of config fields on this command line."""
  return getattr(flags.FLAGS['config'], 'override_values', {})


def config_flags_of_this_process() -> list[str]:
  """`--config` and its overrides as on this command line, to pass to a child process."""
  return [
    f'--config={flags.FLAGS["config"].config_filename}',
    *(
      f'--config.{name}={"none" if value is None else value}' for name, value in overrides().items()
    ),
  ]


def run_command(module: types.ModuleType) -> NoReturn:
  """Runs a command of `diloco`: the `main` of a module. The module may also define DEFAULT_CONFIG
  (the config without --config), DEFAULT_FLAGS (flags that those of the command line override) and
  POSITIONAL (whether it takes arguments that are not flags)."""
  for word in sys.argv[1:]:
    if asked := re.fullmatch(r'-?-(?:h|help|help(full)|\?)', word):
      from diloco_jax.launch import help as help_lib  # only --help needs it

      show = lambda argv: print(help_lib.text(module, full=bool(asked[1])), flush=True)
      sys.exit(_call(show, []))
  sys.argv[1:1] = getattr(module, 'DEFAULT_FLAGS', [])
  run_main(module.main, getattr(module, 'DEFAULT_CONFIG', ''), getattr(module, 'POSITIONAL', False))


def run_main(
  main: Callable[[list[str]], int | None], default_config: str = '', positional: bool = False
) -> NoReturn:
  """Calls absl's app.run with the exit codes of process/exits.py. Without --config it uses the
  config of the run in --workdir, if there is one, else `default_config`. With `positional`, `main`
  gets the arguments that are not flags, else they are refused."""
  argv = last_config_first(sys.argv)
  workdir = _value(argv, 'workdir')
  if workdir and (pathlib.Path(workdir) / load.FILE).is_file():
    default_config = workdir
  if default_config and 'config' in flags.FLAGS and not _value(argv, 'config'):
    argv.insert(1, f'--config={default_config}')
  app.run(
    lambda rest: _call(main, rest),
    argv=argv,
    flags_parser=functools.partial(_parse, positional=positional),
  )


def _with_flag_files(argv: list[str]) -> list[str]:
  """The command line with the words of each --flagfile in its place: config_flags looks for
  --config and its overrides on the command line alone."""
  try:
    if file := _value(argv, 'flagfile'):
      files_lib.require_file(file)
    return argv[:1] + flags.FLAGS.read_flags_from_files(argv[1:], force_gnu=False)
  except (flags.Error, OSError, ValueError) as error:
    sys.exit(exits.refuse(exits.one_line(error)))


def last_config_first(argv: list[str]) -> list[str]:
  """Keeps the last of several --config and puts it before its overrides, as config_flags requires.

  >>> last_config_first(['x', '--config=a.py', '--config.n=1', '--config', 'b.py:v'])
  ['x', '--config=b.py:v', '--config.n=1']
  """
  rest, chosen, words = [], [], iter(argv)
  for word in words:
    if word in ('--config', '-config'):
      chosen = [f'--config={next(words, "")}']
    elif word.startswith(('--config=', '-config=')):
      chosen = ['--' + word.lstrip('-')]
    else:
      rest.append(word)
  return rest[:1] + chosen + rest[1:]


def _value(argv: list[str], name: str) -> str:
  """The last value of a flag on a command line, or ''.

  >>> _value(['x', '--workdir=a', '-workdir', 'b'], 'workdir')
  'b'
  """
  value, words = '', iter(argv)
  for word in words:
    flag, equals, text = word.lstrip('-').partition('=')
    if word.startswith('-') and flag == name:
      value = text if equals else next(words, '')
  return value


def command(*words: str) -> str:
  """The text of a command of `diloco` that works when it is pasted into a shell. It runs in the
  folder of this process, as a config may name files from there."""
  installed = folders.CHECKOUT is None and shutil.which('diloco')
  start = ['diloco'] if installed else [sys.executable, '-P', PROGRAM[-1]]
  return f'cd {shlex.quote(os.getcwd())} && {shlex.join([*start, *words])}'


@contextlib.contextmanager
def importing_jax() -> Iterator[None]:
  """Hides what is imported inside, jax and what needs it, from the garbage collector: it lives to
  the end of the process. Without this the collector looks through it again and again, which is a
  fifth of the CPU time of a start."""
  gc.disable()
  try:
    yield
  finally:
    gc.freeze()
    gc.enable()


@contextlib.contextmanager
def reading_a_model() -> Iterator[None]:
  """The same for a command that reads the model of a run, which may be under way and hold the
  accelerators: on the CPU, unless JAX_PLATFORMS names others."""
  chosen = os.environ.get('JAX_PLATFORMS', 'cpu')
  os.environ['JAX_PLATFORMS'] = chosen if 'cpu' in chosen.split(',') else f'{chosen},cpu'
  logging.set_verbosity(logging.ERROR)  # Orbax writes many lines
  with importing_jax():
    yield


def _call(main: Callable[[list[str]], int | None], argv: list[str]) -> int:
  """Calls `main`; returns its exit code, or the one that stands for its error."""
  if not flags.FLAGS['verbosity'].present:
    logging.set_verbosity(logging.WARNING)  # Orbax logs dozens of lines per checkpoint
  os.umask(0o077)  # weights, tapes and keys are for this user
  try:
    return main(argv) or 0
  except (exits.NeverRetry, exits.DiskFailed, exits.NotInTime) as error:
    return exits.refuse(exits.one_line(error), error.code)
  except app.UsageError as error:
    return exits.refuse(exits.one_line(error))
  except KeyboardInterrupt:
    print('interrupted', file=sys.stderr)
    return exits.INTERRUPTED
  except BrokenPipeError:  # `| head` has exited; the interpreter must not flush into the pipe again
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


def _parse(argv: list[str], positional: bool) -> list[str]:
  sys.argv = argv  # config_flags reads the overrides from there
  try:
    rest = flags.FLAGS(argv)
  except SystemExit:
    sys.exit(exits.NEVER_RETRY)
  except LookupError as error:
    sys.exit(exits.refuse(_explain_lookup(argv, error)))
  except flags.UnrecognizedFlagError as error:
    sys.exit(exits.refuse(f'{exits.one_line(error)}{_hint_at_fields(error.flagname)}'))
  except (exits.NeverRetry, flags.Error, ValueError, TypeError, OSError) as error:
    missing = re.match(r'flag --(\w+)=None: ', str(error))
    about = flags.FLAGS[missing[1]].help.partition(';\n')[0] if missing else ''
    text = f'--{missing[1]} is missing: {about}' if missing else exits.one_line(error)
    sys.exit(exits.refuse(re.sub(_NO_INT, r'\1 is no whole number', text)))
  workdir = flags.FLAGS['workdir'] if 'workdir' in flags.FLAGS else None
  if workdir is not None and workdir.value == '' and workdir.default is None:
    sys.exit(exits.refuse('--workdir is empty: name the folder of the run'))
  buckets = (folders.BUCKET,) if workdir is not None and workdir.help == TO_READ else ()
  for path in (_value(argv, 'workdir'), *rest[1:]):
    if re.match(r'\w[\w+.-]*://', path) and not path.startswith(buckets):
      text = f'{path} is a URL: only folders of a file system work. Nothing was started. What must'
      sys.exit(exits.refuse(f'{text} outlive this machine: --config.train.store=gs://...'))
  if len(rest) > 1 and not positional:
    sys.exit(
      exits.refuse(f'unexpected argument {rest[1]!r}; every argument is a flag, --name=value')
    )
  return rest


def _hint_at_fields(flag: str) -> str:
  """Names the fields of the config that have the name of an unknown flag."""
  names = [field.name for field in fields.walk() if field.name.rpartition('.')[2] == flag]
  if 'config' not in flags.FLAGS or not names:
    return ''
  return f'. In the config: {", ".join(f"--config.{name}" for name in names)}'


def _explain_lookup(argv: list[str], error: LookupError) -> str:
  """Explains an override of an unknown field."""
  known = [field.name for field in fields.walk()]
  for word in argv:
    match = _OVERRIDE.match(word)
    if match and match[1] not in known:
      close = difflib.get_close_matches(match[1], known, n=1, cutoff=0.5)
      hint = f'did you mean --config.{close[0]}?' if close else f'it begins: {", ".join(known[:8])}'
      return f'--config.{match[1]}: the config has no such field; {hint}'
  return exits.one_line(error)
