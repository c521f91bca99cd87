"""The stager process (`headwater.replicate.preapply.process`) as its driver has it: messages, answers, and its end."""

from __future__ import annotations

import multiprocessing
import threading
import time
from typing import Final

from headwater import store_options
from headwater.replicate.preapply.process import Finish, Forget, Stage, StagingAnswer, main

_LONGEST_SECONDS: Final = 120.0
_SLOWEST: Final = 5000
"""A message to the stager is answered within so many seconds, and one more for each `_SLOWEST` changes of it; after
that it counts as hung. To give it up costs work and no rows."""


class Stager:
    """The stager process, started with the first message, for the lake at `root`."""

    def __init__(self, root: str) -> None:
        self._root = root
        self.is_running = False

    def ask(self, message: Stage | Finish | Forget) -> StagingAnswer:
        """EOFError or OSError: it has died. It is killed when it takes nothing, and, TimeoutError, does not answer."""
        if not self.is_running:
            context = multiprocessing.get_context("spawn")
            self._connection, theirs = context.Pipe()
            given = (theirs, self._root)
            self._process = context.Process(target=main, args=given, name="headwater-stager", daemon=True)
            self._process.start()
            theirs.close()
            self.is_running = True
        seconds = _LONGEST_SECONDS
        if not isinstance(message, Forget):
            seconds += sum(block.changes for block in message.blocks) / _SLOWEST
        options = store_options.of(self._root)  # the keys may have been renewed
        began = time.monotonic()
        # A process that stands still does not empty its pipe either: its end is what lets `send` go.
        end = threading.Timer(seconds, self._process.kill)
        end.start()
        try:
            self._connection.send((options, message))
        finally:
            end.cancel()
        if not self._connection.poll(max(0.0, began + seconds - time.monotonic())):
            self._process.kill()
            raise TimeoutError(f"no answer for {seconds:.0f} s")
        answer: StagingAnswer = self._connection.recv()
        return answer

    def close(self) -> None:
        if self.is_running:
            self._connection.close()
            self._process.join(timeout=5)
            if self._process.is_alive():
                self._process.kill()
                self._process.join(timeout=5)  # one that the kernel does not let go ends when it does
