"""Engines: each carries the description of a run (launch/spec.py) out, or writes it as text.

A module here without an underscore in its name is an engine: `diloco launch --engine=NAME`. It has

  known(request) -> spec.Known                        what only it knows
  needs(described, request) -> {text: whether it is there}           if it needs anything
  run(described, request, known) -> int               runs the programs to their end; the exit code
  or
  render(described, request, known) -> {file name: text}

and defines the flags that it alone reads. `known` raises ValueError, one line with a remedy,
for what cannot be. All engines are imported (commands/launch.py), so none imports anything heavy at
its top.
"""
