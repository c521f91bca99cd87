"""What the reader process hands to the driver: a socket for the words, and shared memory for the bytes of blocks.

A chunk's large buffers (pickle protocol 5, out of band) are written to memory that has no name, and its descriptor goes
with the message. So the reader never waits for the driver's interpreter, which is busy decoding, and the driver maps
what it would else have to copy. The memory goes with the last array on it, however either process ends.
"""

from __future__ import annotations

import os
import pickle
import socket
import struct
from multiprocessing.connection import Connection
from typing import Any, Final

import pyarrow as pa

_OUT_OF_BAND: Final = 64 << 10
"""Smaller buffers are cheaper inside the pickle."""
_ALIGNED: Final = 64
_HEAD = struct.Struct("=QI")
_SIZE = struct.Struct("=Q")


class ChunkSender:
    """The reader's end of a duplex `multiprocessing.Pipe`; of one thread. BrokenPipeError when the driver is gone."""

    def __init__(self, connection: Connection) -> None:
        self._socket = socket.socket(fileno=os.dup(connection.fileno()))

    def send(self, item: object) -> None:
        buffers: list[memoryview] = []

        def keep(buffer: pickle.PickleBuffer) -> bool:
            view = buffer.raw()
            if view.nbytes < _OUT_OF_BAND:
                return True
            buffers.append(view)
            return False

        words = pickle.dumps(item, protocol=5, buffer_callback=keep)
        sizes = b"".join(_SIZE.pack(view.nbytes) for view in buffers)
        head = _HEAD.pack(len(words), len(buffers))
        if not buffers:
            self._socket.sendall(head + words)
            return
        descriptor = _in_memory(buffers)
        try:
            sent = socket.send_fds(self._socket, [head], [descriptor])
        finally:
            os.close(descriptor)
        self._socket.sendall(head[sent:] + sizes + words)


class ChunkReceiver:
    """The driver's end; of one thread. EOFError when the reader is gone."""

    def __init__(self, connection: Connection) -> None:
        self._socket = socket.socket(fileno=os.dup(connection.fileno()))

    def receive(self) -> Any:
        """The next item; waits for it."""
        head, descriptors, _, _ = socket.recv_fds(self._socket, _HEAD.size, 1)
        if not head:
            raise EOFError
        try:
            head += self._read(_HEAD.size - len(head))
            length, count = _HEAD.unpack(head)
            sizes = [size for (size,) in _SIZE.iter_unpack(self._read(_SIZE.size * count))]
            words = self._read(length)
            buffers = _mapped(descriptors[0], sizes) if count else []
        finally:
            for descriptor in descriptors:
                os.close(descriptor)
        return pickle.loads(words, buffers=buffers)

    def _read(self, size: int) -> bytes:
        view = bytearray(size)
        filled = 0
        while filled < size:
            got = self._socket.recv_into(memoryview(view)[filled:])
            if got == 0:
                raise EOFError
            filled += got
        return bytes(view)


def _in_memory(buffers: list[memoryview]) -> int:
    """A descriptor of unnamed memory that holds them one behind the other."""
    descriptor = os.memfd_create("headwater-chunk", os.MFD_CLOEXEC)
    try:
        offset = 0
        for view in buffers:
            at = offset
            offset = _next(offset, view.nbytes)
            while len(view):
                written = os.pwrite(descriptor, view, at)
                view, at = view[written:], at + written
        os.ftruncate(descriptor, offset)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def _mapped(descriptor: int, sizes: list[int]) -> list[memoryview]:
    # Not Python's mmap, which keeps a descriptor open for each: there may be thousands of chunks.
    with pa.memory_map(f"/proc/self/fd/{descriptor}") as file:
        whole = memoryview(file.read_buffer())
    views, offset = [], 0
    for size in sizes:
        views.append(whole[offset : offset + size])
        offset = _next(offset, size)
    return views


def _next(offset: int, size: int) -> int:
    """Where the buffer behind one of `size` bytes at `offset` begins."""
    return -(-(offset + size) // _ALIGNED) * _ALIGNED
