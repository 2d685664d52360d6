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
    it, else that of the first one that failed. After the end of one the others have a while."""
    ends: list[tuple[int, int]] = []

    async def end(host: int) -> None:
      code = await self.hosts[host].wait()
      ends.append((host, code))

    waits = [asyncio.create_task(end(host)) for host in range(len(self.hosts))]
    await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
    await asyncio.wait(waits, timeout=LAST_WORDS_S if ends[0][1] else TOGETHER_S)
    self.kill()
    await asyncio.gather(*waits)
    worst = (exits.NEVER, exits.RETRY, exits.DONE)
    ends.sort(key=lambda one: worst.index(exits.outcome(one[1])))
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
  try:
    for host, words in enumerate(_words(len(environments))):
      one, environment = f'{name}.{host}' if host else name, environments[host]
      log = logs / f'{one}.log'
      hosts.append(await children.start(one, [*command, *words], environment, log, listen, cpus))
  except OSError:
    for child in hosts:
      child.kill()
      await child.wait()
    raise
  return Group(hosts)


def _words(hosts: int) -> list[list[str]]:
  """The flags by which each process finds the others; at each start the port may be another."""
  if hosts == 1:
    return [[]]
  meet = files_lib.loopback()
  return [[f'--hosts={hosts}', f'--host={host}', f'--coordinator={meet}'] for host in range(hosts)]


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
