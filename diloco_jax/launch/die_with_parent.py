"""Runs a command that must not outlive the process that started it.

    python -I -S die_with_parent.py PARENT_PID CPUS COMMAND ...

This process asks the kernel (Linux, prctl(2)) to send it SIGKILL when its parent dies for any
reason, and then becomes COMMAND by execve, which keeps the request. Because a separate process
asks, the parent needs no preexec function between fork and exec. CPUS (`0,1`, or `all`) lists the
CPUs that COMMAND may use. On systems other than Linux the process only becomes COMMAND. It imports
the standard library only and starts in milliseconds.
"""

import os
import signal
import sys

_PR_SET_PDEATHSIG = 1


def die_with_parent() -> None:
  """Asks the kernel to kill this process with its parent, unless the parent has already died."""
  if sys.platform == 'linux':
    import ctypes  # nothing else needs it

    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)


def main(parent_pid: int, cpus: str, command: list[str]) -> None:
  die_with_parent()
  if sys.platform == 'linux' and cpus != 'all':
    os.sched_setaffinity(0, {int(cpu) for cpu in cpus.split(',')})
  if os.getppid() != parent_pid:  # the parent died before the request
    sys.exit(1)
  os.execvp(command[0], command)


if __name__ == '__main__':
  main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
