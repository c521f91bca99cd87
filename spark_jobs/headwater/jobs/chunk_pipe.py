"""What the reader process hands to the driver, over a pipe: large buffers beside the pickle, not inside it.

A chunk's bytes are written from where they lie and read to where they stay (pickle protocol 5, out-of-band buffers):
pickled in-band, each byte would be copied twice more on either side, under the interpreter's lock.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import pickle
import struct
from multiprocessing.connection import Connection
from typing import Any, Final

import numpy as np

_OUT_OF_BAND: Final = 64 << 10
"""Smaller buffers are cheaper inside the pickle than with a system call of their own."""
_PIPE_BYTES: Final = 1 << 20
_HEAD = struct.Struct("=QI")
_SIZE = struct.Struct("=Q")
_SET_PIPE_SIZE: Final = getattr(fcntl, "F_SETPIPE_SZ", 1031)


class ChunkSender:
    """The reader's end; of one thread. BrokenPipeError when the driver is gone."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._descriptor = connection.fileno()
        with contextlib.suppress(OSError):  # more than this user may have: the default works, only slower
            fcntl.fcntl(self._descriptor, _SET_PIPE_SIZE, _PIPE_BYTES)

    def send(self, item: object) -> None:
        buffers: list[memoryview] = []

        def keep(buffer: pickle.PickleBuffer) -> bool:
            view = buffer.raw()
            if view.nbytes < _OUT_OF_BAND:
                return True
            buffers.append(view)
            return False

        head = pickle.dumps(item, protocol=5, buffer_callback=keep)
        sizes = b"".join(_SIZE.pack(view.nbytes) for view in buffers)
        self._write(memoryview(_HEAD.pack(len(head), len(buffers)) + sizes + head))
        for view in buffers:
            self._write(view)

    def _write(self, view: memoryview) -> None:
        while len(view):
            view = view[os.write(self._descriptor, view) :]


class ChunkReceiver:
    """The driver's end; of one thread. EOFError when the reader is gone."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._descriptor = connection.fileno()

    def receive(self) -> Any:
        """The next item; waits for it."""
        head_size, count = _HEAD.unpack(self._read(_HEAD.size))
        sizes = self._read(_SIZE.size * count)
        head = self._read(head_size)
        buffers = [self._read(size) for (size,) in _SIZE.iter_unpack(sizes)]
        return pickle.loads(head, buffers=buffers)

    def _read(self, size: int) -> memoryview:
        view = np.empty(size, dtype=np.uint8).data  # not zeroed, unlike a bytearray
        filled = 0
        while filled < size:
            got = os.readv(self._descriptor, [view[filled:]])
            if got == 0:
                raise EOFError
            filled += got
        return view
