"""Memory for payloads that other processes of this machine can use, too.

Each block is a file without a name (memfd_create): another process maps it through its descriptor,
and the kernel frees it with the last process that uses it, also if all are killed. /dev/shm, which
containers make small, is not needed.
"""

import itertools
import mmap
import os
import weakref
from collections.abc import Callable
from typing import NamedTuple

import numpy as np


class Block(NamedTuple):
  """`number`: never used again; `descriptor`: open while the memory is in use."""

  number: int
  descriptor: int


class Blocks:
  """The blocks that this process has made. Thread-safe.

  Attributes:
    freed: called with the number of each block that is freed, in any thread, also in one that
      holds locks.
  """

  def __init__(self):
    self.freed: list[Callable[[int], None]] = []
    self._numbers = itertools.count(1)
    self._blocks: dict[int, Block] = {}  # by address

  def make(self, size: int) -> np.ndarray:
    """Memory for `size` bytes, uint8[size], zeros."""
    descriptor = os.memfd_create('diloco-payloads')
    os.ftruncate(descriptor, size)
    memory = map_block(descriptor)
    address = memory.ctypes.data
    self._blocks[address] = Block(next(self._numbers), descriptor)
    weakref.finalize(memory, self._free, address).atexit = False
    return memory

  def find(self, payload: memoryview) -> Block | None:
    """The block at whose first byte a payload begins; None: it is in other memory."""
    return self._blocks.get(np.frombuffer(payload, np.uint8).ctypes.data)

  def _free(self, address: int) -> None:
    block = self._blocks.pop(address)
    os.close(block.descriptor)
    for report in self.freed:
      report(block.number)


BLOCKS = Blocks()  # of this process


def map_block(descriptor: int) -> np.ndarray:
  """A block's memory, uint8[size]; it stays valid when the descriptor is closed."""
  return np.frombuffer(mmap.mmap(descriptor, 0), np.uint8)
