"""Engines: each carries the description of a run (launch/spec.py) out, or writes it as text.

A module here without an underscore in its name is an engine: `diloco launch --engine=NAME`. It has

  choose(request) -> spec.Choices                      what only it can choose
  needs(described, request) -> {text: whether it is there}           if it needs anything
  run(described, request, choices) -> int             runs the programs to their end; exit code
  or
  render(described, request, choices) -> {file name: text}

and defines the flags that it alone reads. `choose` raises ValueError, one line with a remedy,
for what cannot be. All engines are imported (commands/launch.py), so none imports anything heavy at
its top.
"""
