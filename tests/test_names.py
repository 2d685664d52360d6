"""One thing, one name: of commands, loops, the functions that users call, and the config."""

import ast
import collections
import dataclasses
import inspect
import pathlib
import re

import pytest

import diloco_jax
from diloco_jax.config import fields
from diloco_jax.configs import own_loop

ROOT = pathlib.Path(__file__).resolve().parents[1]
COMMANDS = ROOT / 'diloco_jax' / 'commands'
EXAMPLES = ROOT / 'experiments' / 'examples'

# What the help of a flag speaks of, and the one name of it. The first that fits counts.
THINGS = {
  r'\bid of (this|the) learner\b': 'learner',
  r'\bwhere the syncer listens\b|\bof a syncer that\b': 'syncer',
  r'^(a )?folder of (the|a) run\b|\bas for diloco_jax.join': 'workdir',
  r'\bname of the run\b': 'name',
  r'\bHOST:PORT (to listen|for learners)\b': 'listen',
  r'\bcertificate of this node\b|\bowner.s folder\b|\bdiloco certs made\b': 'tls',
  r'\bcontinue the run\b': 'resume',
  r'\bversion 0\b': 'init',
  r'\bprocesses; 0: one per core\b': 'jobs',
  r'\b(shorter|fewer|few rounds)\b': 'quick',
  r'\bTPU slice of each\b|\bchips of one slice\b': 'topology',
}

# The command that does what a function does, and the parameters that only a program can give:
# arrays, functions and objects, and for how long its call may last.
FUNCTIONS = {
  'join': ('learner', {'params', 'opt_state', 'exchange', 'label', 'sync', 'wait_s'}),
  'run_syncer': ('syncer', {'evaluate', 'label', 'sync'}),
  'run': ('train', set()),
  'open_run': ('report', set()),
  'load_params': ('export', {'into'}),
  'records': ('status', set()),
}
PROTOCOL = {'total_steps'}  # T, train.steps of a config

# Words of the glossary that have meant many things, and what a module has that gives one its name.
WORDS = {
  'place': r'\b(folders|json_files|files_port|store_lib|class Files)\b',
  'life': r'(?!)',  # no module: a process, or the incarnation of a learner
  'piece': r'exchange\.Pieces|fragments\.Piece|layout\.fragments',
}


def flags_in(path: pathlib.Path) -> dict[str, str]:
  """The flags that a file defines, with their help."""
  defined = {}
  for node in ast.walk(ast.parse(path.read_text('utf-8'))):
    if isinstance(node, ast.Call):
      name = getattr(node.func, 'attr', '')
      words = [*node.args, *(keyword.value for keyword in node.keywords)]
      texts = [word.value for word in words if isinstance(word, ast.Constant)]
      texts = [text for text in texts if isinstance(text, str)]
      if texts and (name.startswith('DEFINE_') or name == 'add_argument'):
        defined[texts[0].lstrip('-')] = max(texts[1:], key=len, default='')
  return defined


def flags_of(command: str) -> set[str]:
  return {*flags_in(COMMANDS / f'{command}.py'), *flags_in(COMMANDS.parent / 'launch' / 'cli.py')}


FILES = [
  path
  for room in ('diloco_jax', 'experiments', 'scripts')
  for path in sorted((ROOT / room).rglob('*.py'))
  if flags_in(path)
]


LOOPS = [path for path in FILES if path.parent == EXAMPLES]


def test_run_syncer_names_the_settings_that_a_new_sync_would_change():
  usual, new = own_loop.get_config().sync, diloco_jax.SyncConfig()
  (said,) = re.findall(
    r'SyncConfig\(\) has other (.*?),\s+so\b', diloco_jax.run_syncer.__doc__, re.S
  )
  names = [field.name for field in dataclasses.fields(new)]
  differ = {name for name in names if getattr(usual, name) != getattr(new, name)}
  assert set(re.findall(r'\w+', said)) - {'and'} == differ


def test_there_are_flags_to_compare():
  seen = {name for path in FILES for name in flags_in(path)}
  assert len(FILES) > 30 and set(THINGS.values()) <= seen
  assert {'loop_optax', 'lora'} <= {loop.stem for loop in LOOPS}


@pytest.mark.parametrize('path', FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_one_thing_has_one_name(path: pathlib.Path):
  for flag, text in flags_in(path).items():
    name = next((THINGS[pattern] for pattern in THINGS if re.search(pattern, text, re.I)), flag)
    assert flag == name, f'--{flag} is {text!r}, which is --{name} elsewhere'


@pytest.mark.parametrize('name', FUNCTIONS)
def test_functions_name_what_commands_name(name: str):
  command, of_programs = FUNCTIONS[name]
  settings = {field.name.rpartition('.')[2] for field in fields.walk()} | PROTOCOL
  given = set(inspect.signature(getattr(diloco_jax, name)).parameters)
  unknown = given - of_programs - flags_of(command) - settings
  assert not unknown, f'diloco {command} has no such flag, and the config no such field'


@pytest.mark.parametrize('loop', LOOPS, ids=lambda path: path.stem)
def test_loops_name_what_join_and_the_command_name(loop: pathlib.Path):
  both = set(inspect.signature(diloco_jax.join).parameters) & flags_of('learner')
  assert set(flags_in(loop)) - {'base'} <= both  # the base of LoRA is its own


def test_no_text_manifest_or_notebook_has_another_name_of_a_learner():
  rooms = ('diloco_jax', 'docs', 'experiments', 'scripts', 'tests')
  files = [path for room in rooms for path in (ROOT / room).rglob('*') if path.is_file()]
  kinds = {'.py', '.md', '.ipynb', '.sh', '.yaml', '.html', '.proto'}
  others = [
    path
    for path in [ROOT / 'README.md', *files]
    if path.suffix in kinds and path.name not in ('CHANGELOG.md', 'test_names.py')
    if '--learner' + '_id' in path.read_text('utf-8', 'replace')
  ]
  assert not others


@pytest.mark.parametrize('word', WORDS)
def test_a_word_has_the_meaning_of_the_glossary(word: str):
  is_word = re.compile(rf'_?({word}|{word}s)', re.I).fullmatch
  others = []
  for path in sorted((ROOT / 'diloco_jax').rglob('*.py')):
    text = path.read_text('utf-8')
    if word in text.lower() and not re.search(WORDS[word], text):
      nodes = ast.walk(ast.parse(text))
      names = {getattr(node, kind, '') for node in nodes for kind in ('id', 'arg', 'attr', 'name')}
      others += [(str(path), name) for name in names if is_word(str(name))]
  assert not others


def test_a_module_is_imported_under_one_name():
  names = collections.defaultdict(set)
  for room in ('diloco_jax', 'experiments', 'scripts', 'tests'):
    for path in (ROOT / room).rglob('*.py'):
      for node in ast.walk(ast.parse(path.read_text('utf-8'))):
        if isinstance(node, ast.ImportFrom):
          for alias in node.names:
            module = f'{node.module}.{alias.name}'
            if (ROOT / module.replace('.', '/')).with_suffix('.py').exists():
              names[module].add(alias.asname or alias.name)
  assert len(names) > 250
  assert not {module: both for module, both in names.items() if len(both) > 1}


# Names that do not name their thing, and how often they are bound. None of these numbers may grow.
PRONOUNS = {'one', 'found', 'told', 'made', 'its', 'there', 'mine', 'taken'}
# The tests' are in the text of which a golden tokenizer is made (tests/storage/hugging_face).
MOST = {'diloco_jax': 0, 'experiments': 0, 'scripts': 0, 'tests': 4}


@pytest.mark.parametrize('room', MOST)
def test_a_name_names_its_thing(room: str):
  bound = collections.Counter()
  for path in (ROOT / room).rglob('*.py'):
    for node in ast.walk(ast.parse(path.read_text('utf-8'))):
      stored = isinstance(getattr(node, 'ctx', None), ast.Store)
      if isinstance(node, ast.arg) or stored or hasattr(node, 'returns'):
        name = getattr(node, 'arg', getattr(node, 'id', getattr(node, 'attr', '')))
        bound[path.relative_to(ROOT)] += getattr(node, 'name', name) in PRONOUNS
  assert bound.total() <= MOST[room], {path: count for path, count in bound.items() if count}
