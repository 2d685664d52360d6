"""The processes of one program of the supervisor: one, or one for each host of a learner."""

import asyncio
import pathlib
import signal
from collections.abc import Mapping, Sequence

from diloco_jax.launch import children
from diloco_jax.process import exits
from diloco_jax.storage import files as files_lib

LAST_WORDS_S = 2.0  # of the other hosts, once one has failed
TOGETHER_S = 30.0  # for all hosts to end, once one is done


class Group:
  """Running or ended processes that live and die together, with the methods of a children.Child.
  Made by `start`."""

  def __init__(self, hosts: list[children.Child]):
    self.hosts = hosts
    self.started_s = hosts[0].started_s
    self.pid = hosts[0].pid
    self.last_error = ''

  @property
  def running(self) -> bool:
    return any(child.running for child in self.hosts)

  async def wait(self) -> tuple[int, str]:
    """Returns an exit code and how its process ended, once all have ended: 42 if a host ended with
    it, else the exit code of the first host that failed. After the end of a host the others have
    LAST_WORDS_S or TOGETHER_S."""
    ends: list[tuple[int, int]] = []

    async def wait_for(host: int) -> None:
      code = await self.hosts[host].wait()
      ends.append((host, code))

    waits = [asyncio.create_task(wait_for(host)) for host in range(len(self.hosts))]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.wait(waits, timeout=LAST_WORDS_S if ends[0][1] else TOGETHER_S)
    self.kill()
    await asyncio.gather(*waits)
    worst = (exits.NEVER, exits.RETRY, exits.DONE)
    ends.sort(key=lambda host_and_code: worst.index(exits.outcome(host_and_code[1])))
    host, code = ends[0]
    self.last_error = self.hosts[host].last_error
    return code, (f'host {host} ' if len(ends) > 1 else '') + _describe_exit(code)

  def freeze(self) -> None:
    for child in self.hosts:
      child.freeze()

  def thaw(self) -> None:
    for child in self.hosts:
      child.thaw()

  def terminate(self) -> None:
    for child in self.hosts:
      child.terminate()

  def kill(self) -> None:
    for child in self.hosts:
      child.kill()


async def start(
  name: str,
  command: Sequence[str],
  environments: Sequence[Mapping[str, str]],
  logs: pathlib.Path,
  listen: children.Listen,
  cpus: Sequence[int] = (),
) -> Group:
  """Starts a process for each of the environments: the hosts of a learner, if there are several.
  Raises OSError, and leaves none, if one cannot be started."""
  hosts: list[children.Child] = []
  host_flags: list[str] = []  # by which they find each other; at each start with another port
  if len(environments) > 1:
    host_flags = [f'--hosts={len(environments)}', f'--coordinator={files_lib.loopback()}']
  try:
    for host, environment in enumerate(environments):
      host_name = f'{name}.{host}' if host else name
      argv = [*command, *host_flags, f'--host={host}'] if host_flags else command
      log = logs / f'{host_name}.log'
      hosts.append(await children.start(host_name, argv, environment, log, listen, cpus))
  except OSError:
    for child in hosts:
      child.kill()
      await child.wait()
    raise
  return Group(hosts)


def _describe_exit(code: int) -> str:
  """Describes an exit code.

  >>> _describe_exit(-9), _describe_exit(3)
  ('killed by SIGKILL', 'ended with exit code 3')
  """
  if code >= 0:
    return f'ended with exit code {code}'
  try:
    return f'killed by {signal.Signals(-code).name}'
  except ValueError:
    return f'killed by signal {-code}'
