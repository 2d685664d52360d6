"""How every program of the project starts: flags, the config, and what its exit code means.

Exit codes are the contract with whatever restarts processes (a supervisor, Kubernetes): 0 is done,
42 is *never retry* (the command or the config is wrong, or the log on disk is damaged or does not
belong here: a retry would fail the same way, a person has to decide), 74 the disk has failed or is
full, or a syncer did not end in time (a retry recovers what was committed), 75 a learner did not,
anything else is worth another try, too. What ends with 42, 74 or 75 is said in one line that starts
with `error:` and shows the values and the remedy; a traceback is for errors that nobody expected.

No jax in here: `--help`, a mistyped flag and the supervisor answer at once.
"""

import contextlib
import difflib
import functools
import os
import pathlib
import re
import sys
from collections.abc import Callable, Iterator
from typing import NoReturn

from absl import app, flags, logging
from ml_collections import config_flags

from diloco_jax.config import run_config
from diloco_jax.storage import wal_format

NEVER_RETRY = 42
DISK_FAILED = 74
NOT_IN_TIME = 75
INTERRUPTED = 130

_OVERRIDE = re.compile(r'--?(?:no)?config\.([^=]+)')


class NeverRetry(Exception):
  """The command, the config, the machine's set-up or what is on its disk is wrong: one line, exit
  42."""

  code = NEVER_RETRY


class DiskFailed(Exception):
  """The disk failed; what was committed is safe: one line, exit 74."""

  code = DISK_FAILED


class _OptionalIntParser(flags.ArgumentParser):
  """`=2` sets, `=none` clears; absl's integer parser knows no none."""

  def parse(self, argument: str | int | None) -> int | None:
    if argument is None or isinstance(argument, int):
      return argument
    if argument.lower() in ('none', 'null', ''):
      return None
    return flags.IntegerParser().parse(argument)

  def flag_type(self) -> str:
    return 'integer or none'


flags.disclaim_key_flags()  # --config belongs to the program that defines it, in --help too
config_flags.register_flag_parser_for_type(run_config.OptionalInt, _OptionalIntParser())


def define_config() -> flags.FlagHolder:
  """Defines --config=FILE.py[:VARIANT] and, with it, the overrides --config.a.b=value.

  It has no default here, since a default would be read at import, where nobody catches its errors.
  """
  return config_flags.DEFINE_config_file(
    'config',
    help_string='FILE.py:VARIANT; change any field of it with --config.sync.quorum=2',
  )


def config() -> run_config.Config:
  """The config that the flags name, validated. Raises NeverRetry."""
  value = flags.FLAGS['config'].value
  if value is None:
    raise NeverRetry('no --config given; for example --config=experiments/configs/stdlib_lm.py:cpu')
  path = flags.FLAGS['config'].config_filename.split(':', 1)[0]
  if not pathlib.Path(path).is_file():  # config_flags keeps this error back until a field is read
    raise NeverRetry(_no_file(path))
  with never_retry():
    value.validate()
  return value


def config_flags_of_this_process() -> list[str]:
  """`--config` and its overrides as this process was given them, to pass on to a child."""
  flag = flags.FLAGS['config']
  overrides = getattr(flag, 'override_values', {})
  return [f'--config={flag.config_filename}'] + [
    f'--config.{name}={"none" if value is None else value}' for name, value in overrides.items()
  ]


@contextlib.contextmanager
def never_retry(*kinds: type[Exception]) -> Iterator[None]:
  """Exceptions of these kinds (ValueError by default) inside end the process with 42, one line."""
  caught = kinds or (ValueError,)
  try:
    yield
  except caught as error:
    raise NeverRetry(one_line(error)) from error


@contextlib.contextmanager
def log_failures() -> Iterator[None]:
  """A write-ahead log with which nothing can go on ends the process with 74 or 42, one line."""
  try:
    yield
  except (wal_format.WalBroken, wal_format.WalFull) as error:
    raise DiskFailed(one_line(error)) from error
  except wal_format.WalError as error:
    raise NeverRetry(one_line(error)) from error


def one_line(error: BaseException | str) -> str:
  """The words of an error without its line breaks.

  >>> one_line(ValueError('quorum is 5,\\n  it must be at most 4'))
  'quorum is 5, it must be at most 4'
  """
  return ' '.join(str(error).split()) or type(error).__name__


def run_main(
  main: Callable[[list[str]], int | None], default_config: str = '', positional: bool = False
) -> NoReturn:
  """absl's app.run with the exit codes above; `default_config` stands in for a missing --config,
  `positional`: words that are no flags are for `main`, else they are refused."""
  argv = last_config_first(sys.argv)
  if default_config and not _config_path(argv):
    argv.insert(1, f'--config={default_config}')
  app.run(
    lambda rest: _guarded(main, rest),
    argv=argv,
    flags_parser=functools.partial(_parse, positional=positional),
  )


def last_config_first(argv: list[str]) -> list[str]:
  """Of several --config the last wins, and it comes before its overrides (config_flags wants that).

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


def _guarded(main: Callable[[list[str]], int | None], argv: list[str]) -> int:
  if not flags.FLAGS['verbosity'].present:
    logging.set_verbosity(logging.WARNING)  # libraries (Orbax) tell dozens of lines per checkpoint
  try:
    return main(argv) or 0
  except (NeverRetry, DiskFailed) as error:
    return _refuse(one_line(error), error.code)
  except app.UsageError as error:
    return _refuse(one_line(error))
  except KeyboardInterrupt:
    print('interrupted', file=sys.stderr)
    return INTERRUPTED
  except BrokenPipeError:  # `| head` has seen enough; the interpreter must not flush into it again
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 1


def _refuse(text: str, code: int = NEVER_RETRY) -> int:
  sys.stdout.flush()
  print(f'error: {text}', file=sys.stderr, flush=True)
  return code


def _parse(argv: list[str], positional: bool = False) -> list[str]:
  wants_help = any(word.lstrip('-').split('=')[0] in ('help', 'helpfull') for word in argv[1:])
  sys.argv = argv  # config_flags looks for the overrides there
  try:
    rest = flags.FLAGS(argv)
  except SystemExit:
    sys.exit(0 if wants_help else NEVER_RETRY)
  except (flags.Error, LookupError, ValueError, TypeError, OSError) as error:
    sys.exit(_refuse(_explain(argv, error)))
  if len(rest) > 1 and not positional:
    sys.exit(_refuse(f'unexpected argument {rest[1]!r}; every argument is a flag, --name=value'))
  return rest


def _explain(argv: list[str], error: Exception) -> str:
  """What is wrong with the command line, in one line."""
  path = _config_path(argv)
  if path and not pathlib.Path(path).is_file():
    return _no_file(path)
  if isinstance(error, LookupError) and path:
    return _explain_lookup(argv, path, error)
  if 'Error whilst parsing config file' in str(error):
    return f'--config={path}: {str(error).strip().splitlines()[-1]}'
  return one_line(error)


def _no_file(path: str) -> str:
  return f'--config: there is no file {path!r} (seen from {pathlib.Path.cwd()})'


def _config_path(argv: list[str]) -> str:
  values = [word.split('=', 1)[1] for word in argv if word.startswith('--config=')]
  return values[-1].split(':', 1)[0] if values else ''


def _explain_lookup(argv: list[str], path: str, error: Exception) -> str:
  """An override that names no field, or a variant that the file does not have."""
  known = _known_names()
  for word in argv:
    match = _OVERRIDE.match(word)
    if match and known and re.sub(r'\[\d+\]', '', match[1]) not in known:
      close = difflib.get_close_matches(match[1], known, n=1, cutoff=0.5)
      hint = f'did you mean --config.{close[0]}?' if close else f'it begins: {", ".join(known[:8])}'
      return f'--config.{match[1]}: the config has no such field; {hint}'
  return f'--config={path}: {one_line(error)}'


def _known_names() -> list[str]:
  """Dotted names of all fields of a Config, from its types."""
  import dataclasses  # pylint: disable=g-import-not-at-top
  import typing  # pylint: disable=g-import-not-at-top

  def walk(kind, prefix):
    hints = typing.get_type_hints(kind)
    for field in dataclasses.fields(kind):
      inner = (typing.get_args(hints[field.name]) or (hints[field.name],))[0]
      yield prefix + field.name
      if dataclasses.is_dataclass(inner):
        yield from walk(inner, f'{prefix}{field.name}.')

  return list(walk(run_config.Config, ''))
