"""The reader process as its parent has it: starts it, speaks to it, ends it. What it says is
`headwater.replicate.reader.handle`'s matter."""

from __future__ import annotations

import contextlib
import multiprocessing
import threading
from typing import Any

from headwater.log.spill import SpillFolder
from headwater.replicate.reader.process import ReaderOptions, main


class ReaderProcess:
    """Starts before it is told what to read: that costs a second, which may be over when the slot comes free. Its words
    are read from `data`; what it spills lies in `folder`, which is gone when it has ended."""

    def __init__(self) -> None:
        self._folder = SpillFolder()
        self._folder.__enter__()
        context = multiprocessing.get_context("spawn")
        self.data, data = context.Pipe()
        control, self._control = context.Pipe(duplex=False)
        self._process = context.Process(
            target=main, args=(self._folder.path, data, control), name="headwater-reader", daemon=True
        )
        self._process.start()
        for end in (data, control):
            end.close()
        self._sending = threading.Lock()
        self._ending = threading.Event()
        self._ended = False

    @property
    def folder(self) -> str:
        return self._folder.path

    @property
    def pid(self) -> int:
        return self._process.pid or 0

    @property
    def is_awake(self) -> bool:
        """Its first word has come, which is for whoever reads the pipe."""
        return self.is_alive and self.data.poll(0)

    @property
    def is_alive(self) -> bool:
        return self._process.is_alive()

    def read(self, options: ReaderOptions) -> None:
        """What to read; from now on it hears once a second that its driver lives."""
        with contextlib.suppress(OSError):  # a process that is gone is noticed where its words are awaited
            self._control.send(options)
        threading.Thread(target=self._beat, name="headwater-heartbeat", daemon=True).start()

    def tell(self, word: str, value: Any = None) -> None:
        """From any thread."""
        with self._sending, contextlib.suppress(OSError):
            self._control.send((word, value))

    def _beat(self) -> None:
        while not self._ending.wait(1.0):
            self.tell("alive")

    def discard(self) -> None:
        """It is not needed (any more)."""
        self._control.close()  # it finds the end of the pipe, and ends
        self.end()

    def end(self) -> None:
        """Wait for its end, which it has been told; at last kill it. Once is enough."""
        if self._ended:
            return
        self._ended = True
        self._process.join(timeout=5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join(timeout=5)
        self._ending.set()
        self._folder.__exit__()
