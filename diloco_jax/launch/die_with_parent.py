"""Runs a command that must not outlive the process that started it.

    python -I -S die_with_parent.py PARENT_PID CPUS COMMAND ...

Asks the kernel (Linux, prctl(2)) to kill this process when its parent dies, however that happens,
and then becomes COMMAND by execve, which keeps the request. Asking here, in a process of its own,
rather than between fork and exec of the parent, keeps the parent free of preexec functions.
CPUS (`0,1`, or `all`) is where COMMAND may run. Elsewhere than on Linux it only becomes COMMAND.
Standard library only; it starts in milliseconds.
"""

import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
  """Asks for it; a parent that is dead already is not noticed."""
  if sys.platform == 'linux':
    import ctypes  # pylint: disable=g-import-not-at-top

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def main(parent_pid: int, cpus: str, command: list[str]) -> None:
  die_with_parent()
  if sys.platform == 'linux' and cpus != 'all':
    os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split(',')})
  if os.getppid() != parent_pid:  # it died before we asked
    sys.exit(1)
  os.execvp(command[0], command)


if __name__ == '__main__':
  main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
