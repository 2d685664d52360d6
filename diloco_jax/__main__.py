"""The command `diloco`: each of its commands is a module of a folder `commands`.

Also `python -m diloco_jax`, which needs no installation. Flags are global, so only the module of
the command that runs is imported.
"""

import os
import sys

if __name__ == '__main__':  # -m puts the folder of the start first: its secrets.py is not Python's
  _HOME = os.path.dirname(os.path.dirname(os.path.abspath(__file__)))
  del sys.path[: not sys.flags.safe_path]
  if _HOME not in sys.path:  # of a checkout: after the standard library
    _AT = [path.endswith('-packages') for path in (*sys.path, 'no-packages')].index(True)
    sys.path.insert(_AT, _HOME)

import difflib
import importlib
from typing import NoReturn

import diloco_jax
from diloco_jax.launch import cli
from diloco_jax.process import exits

COMMANDS = {
  'train': 'run an experiment on this machine: a syncer and its learners',
  'launch': 'start a run here or on Ray, or write the files for GKE or Slurm',
  'syncer': 'run the syncer as one process',
  'learner': 'run one learner as one process, or train alone',
  'plan': 'say what a run needs, and whether it fits its links',
  'aot': 'compile a config for a TPU slice on a machine without TPUs',
  'init': 'write the folder of a project to begin with, which runs',
  'example': 'print a file to begin with: a loop or a model of your own',
  'status': 'show a run in the browser, while it trains and afterwards',
  'report': 'print and draw what happened in a run, or in several',
  'track': 'send the curves of a run to Weights & Biases',
  'sample': 'print text of a trained model',
  'evaluate': 'print the held-out loss of a trained model',
  'export': 'write a trained model as one *.safetensors file',
  'simulate': 'run the state machines in a simulated world with random faults',
  'chaos': 'run a plan of faults on real processes and check what they recorded',
  'replay': 'run the machines of a past run again from what they recorded',
  'restore': 'bring a run back to a kept checkpoint',
  'certs': 'make and check the certificates of a run on several machines',
}
_FIRST = {'train': 'run', 'status': 'look', 'simulate': 'test', 'restore': 'keep'}  # of each group
_VERIFICATION_COMMANDS = ('plan', 'simulate', 'chaos', 'replay')
_HELP = ('help', '--help', '-h', '-help', '-?', '--helpfull')
_VERSION = ('version', '--version')
_COMPLETION = 'completion'
_SCRIPTS = {  # for `eval`, of a shell that completes the names of commands and, after them, files
  'bash': """_diloco() {
  local word="${COMP_WORDS[COMP_CWORD]}" before="${COMP_WORDS[COMP_CWORD-1]}" flag='' words='%s'
  if [ "$COMP_CWORD" != 1 ]; then
    [ "$before" = = ] && flag="${COMP_WORDS[COMP_CWORD-2]}="
    [ "$word" = = ] && flag="$before=" word=''
    words=$(diloco completion words "${COMP_WORDS[1]}" | sed -n "s|^$flag||p")
    compopt -o nospace
  fi
  COMPREPLY=($(compgen -W "$words" -- "$word"))
}
complete -o default -F _diloco diloco""",
  'zsh': """_diloco() {
  local -a names=(%s)
  if ((CURRENT == 2)); then _describe command names
  else compadd -S '' -- $(diloco completion words $words[2]); _files; fi
}
compdef _diloco diloco""",
  'fish': 'complete -c diloco -n __fish_use_subcommand -f\n%s\ncomplete -c diloco -n "not '
  '__fish_use_subcommand" -a "(diloco completion words (commandline -opc)[2])"',
}


def main() -> NoReturn:
  """Runs the command that the first argument names."""
  cli.speak_utf8()
  name, *words = sys.argv[1:] or ['help']
  if name in _HELP and words[:1] and words[0] in COMMANDS:
    name, words = words[0], ['--help']
  if name in _HELP:
    print(usage())
    sys.exit(0)
  if name in _VERSION:
    print(f'diloco {diloco_jax.__version__}')
    sys.exit(0)
  if name == _COMPLETION:
    sys.exit(_complete(words))
  if name not in COMMANDS:
    sys.exit(exits.refuse(_unknown(name)))
  sys.argv = [f'diloco {name}', *words]
  cli.run_command(importlib.import_module(module(name)))


def module(name: str) -> str:
  """The module of a command."""
  package = 'diloco_jax.verification' if name in _VERIFICATION_COMMANDS else 'diloco_jax'
  return f'{package}.commands.{name}'


def usage() -> str:
  """The commands in their groups, one line each."""
  width = max(map(len, COMMANDS))
  lines = ['usage: diloco COMMAND [--flag=value ...]']
  for name, text in COMMANDS.items():
    lines += ['', _FIRST[name]] if name in _FIRST else []
    lines.append(f'  {name:{width}}  {text}')
  lines += ['', 'diloco COMMAND --help: its flags']
  return '\n'.join([*lines, 'diloco completion bash|zsh|fish: a script for the shell to evaluate'])


def _complete(words: list[str]) -> int:
  """Prints the script of a shell, or (words COMMAND) what may follow a command."""
  if words[:1] == ['words']:
    return _print_words(words[-1])
  texts = {name: text.replace("'", '') for name, text in COMMANDS.items()}
  line = "complete -c diloco -n __fish_use_subcommand -f -a {} -d '{}'"
  filled = {
    'bash': ' '.join([*COMMANDS, 'help', _COMPLETION]),
    'zsh': ' '.join(f"'{name}:{text.replace(':', ',')}'" for name, text in texts.items()),
    'fish': '\n'.join(line.format(*row) for row in texts.items()),
  }
  if len(words) != 1 or words[0] not in filled:
    return exits.refuse(f'{_COMPLETION}: name one shell of {", ".join(filled)}')
  print(_SCRIPTS[words[0]] % filled[words[0]])
  return 0


def _print_words(name: str) -> int:
  if name in COMMANDS:
    from diloco_jax.launch import help as help_lib  # only completion needs it

    sys.argv = [f'diloco {name}']
    print('\n'.join(help_lib.words(importlib.import_module(module(name)))))
  else:
    print('\n'.join({_COMPLETION: ['bash', 'fish', 'zsh'], 'help': COMMANDS}.get(name, [])))
  return 0


def _unknown(name: str) -> str:
  close = difflib.get_close_matches(name, COMMANDS, n=1)
  hint = f'did you mean {close[0]}?' if close else 'diloco help lists them'
  return f'there is no command {name!r}; {hint}'


if __name__ == '__main__':
  main()
