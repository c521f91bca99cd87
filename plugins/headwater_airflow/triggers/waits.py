"""The waits of a pipeline in a triggerer, which look together: however many there are, a tick reads the position file
once, and the source is asked one question for all of them.

A tick runs in a thread. So does a question, beside the ticks, since it may take long. What a wait has to say, and how
it ends, goes through a queue to its trigger, so that Airflow finds it in the log where it belongs. A lake or a source
that does not answer at all holds a wait no longer than half a minute past its deadline.
"""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
import os
import time
from collections import deque
from collections.abc import AsyncIterator, Awaitable, Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar
from weakref import WeakKeyDictionary

from airflow.sdk.exceptions import AirflowNotFoundException, AirflowRuntimeError

from headwater_airflow.hooks.source import async_connection_environment
from headwater_airflow.hooks.store import fetch_in_triggerer
from headwater_airflow.triggers.threads import in_thread

if TYPE_CHECKING:
    from headwater.errors import HeadwaterError
    from headwater.pipeline_file.pipeline import Pipeline
    from headwater.waiting.lookout import Question, SharedLookout
    from headwater.waiting.waiter import Waiter

_AT_LEAST_SECONDS = 0.05
"""Between two ticks, however many waits come and go."""
_TELL_SECONDS = 1.0
"""Of a tick, at most, before its waits are told, also while one of its looks hangs. Not sooner: whenever a look lets go
of the interpreter, by reading or writing a file, the event loop would take its turn, and the next look would wait for
it (a thousand that are satisfied took 1.2 s instead of 0.5)."""
_OUTAGE_SECONDS = 2.0
_ANSWER_SECONDS = 30.0
"""A source that takes longer for an answer, or a lake for a look, does not answer."""
_PROGRESS_SECONDS, _WORD_SECONDS = 1.0, 30.0


@dataclass(frozen=True, slots=True)
class Word:
    """What a wait says while it goes on; `trouble`: something does not answer."""

    text: str
    trouble: bool = False


@dataclass(frozen=True, slots=True)
class End:
    """How a wait has ended."""

    result: dict[str, Any]
    exit_status: int


Told = Word | End | Exception
_T = TypeVar("_T")


@dataclass(slots=True, eq=False)
class Wait:
    """One of the waits. `remaining`: seconds to its deadline; `ended`: nobody listens to it any more."""

    build: Callable[[Pipeline, SharedLookout], Waiter]
    remaining: Callable[[], float]
    look_seconds: float
    told: asyncio.Queue[Told] = field(default_factory=asyncio.Queue)
    ended: bool = False
    _waiter: Waiter | None = None
    _trouble: str = ""
    _blocker: str = ""
    _next_progress: float = 0.0
    _next_word: float = 0.0

    def look(self, pipeline: Pipeline, lookout: SharedLookout) -> Word | End | None:
        """One look; what there is to tell of it."""
        if self._waiter is None:
            self._waiter = self.build(pipeline, lookout)
        elif not self._trouble and self._waiter.is_far:
            return None
        result = self._waiter.look()
        if result is not None:
            return End(result.to_json(), result.exit_status)
        self._trouble = ""
        now = time.monotonic()
        if now < self._next_progress:
            return None
        self._next_progress = now + _PROGRESS_SECONDS
        progress = self._waiter.progress
        # Positions move with every look; what holds the wait up seldom changes.
        held = progress.blocker.partition(";")[0] if progress is not None else ""
        if progress is None or (now < self._next_word and held == self._blocker):
            return None
        self._blocker, self._next_word = held, now + _WORD_SECONDS
        return Word(str(progress))

    def failed(self, error: HeadwaterError) -> Word | End | None:
        """What an error is for this wait: an outage is waited out, up to the deadline."""
        from headwater.errors import Transient

        if not isinstance(error, Transient) or self.remaining() <= 0:
            return End(error.to_json(), error.exit_status)
        if str(error) == self._trouble:
            return None
        self._trouble = str(error)
        return Word(self._trouble, trouble=True)


class Waits:
    """Those of the pipeline file `path`, as it was when the first of them looked: what is written to it later is for
    those that begin then."""

    def __init__(self, path: str) -> None:
        self._path, self._text = path, b""
        self._waits: list[Wait] = []
        self._found: deque[tuple[Wait, Told | None]] = deque()
        self._ready: tuple[Pipeline, SharedLookout] | None = None
        self._event_loop = asyncio.get_running_loop()
        fetch_in_triggerer()
        self._wanted = asyncio.Event()
        self._ticking: asyncio.Task[None] | None = None
        self._asking: asyncio.Task[None] | None = None

    def join(self, wait: Wait) -> None:
        self._waits.append(wait)
        self._wanted.set()
        if self._ticking is None or self._ticking.done():
            # In no trigger's context: what is logged for all must not end up in the log of the first.
            self._ticking = self._event_loop.create_task(self._run(), context=contextvars.Context())

    def leave(self, wait: Wait) -> bool:
        """Whether it was the last one."""
        self._waits.remove(wait)
        wait.ended = True
        if self._waits:
            return False
        for task in (self._ticking, self._asking):
            if task is not None:
                task.cancel()
        return True

    async def _run(self) -> None:
        try:
            await self._look_on()
        except Exception as error:
            for wait in self._waits:
                wait.told.put_nowait(error)
            raise

    async def _look_on(self) -> None:
        while True:
            self._wanted.clear()
            waits = [wait for wait in self._waits if not wait.ended]
            looking = asyncio.ensure_future(in_thread(self._path, self._tick, waits))
            try:
                while not looking.done():
                    await asyncio.wait({looking}, timeout=_TELL_SECONDS)
                    self._tell()
            finally:
                looking.cancel()
            question, outage = looking.result()
            if question is not None and (self._asking is None or self._asking.done()):
                self._asking = self._event_loop.create_task(self._ask(question))
            await asyncio.sleep(_AT_LEAST_SECONDS)
            least = self._least_pause()
            seconds = [_OUTAGE_SECONDS if outage else max(wait.look_seconds, least) for wait in waits]
            seconds += [wait.remaining() for wait in waits]
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._wanted.wait(), max(min(seconds, default=0) - _AT_LEAST_SECONDS, 0.001))

    def _least_pause(self) -> float:
        return self._ready[1].longest_pause if self._ready is not None else 0.0

    def _tick(self, waits: Iterable[Wait]) -> tuple[Question | None, bool]:
        """One look for all `waits`: what is to be asked of the source, and whether the lake did not answer."""
        from headwater.errors import HeadwaterError

        known = (HeadwaterError, OSError)
        try:
            pipeline, lookout = self._ready = self._ready or self._begun()
            lookout.refresh()
            lookout.look()
        except Exception as error:
            for wait in waits:
                self._found.append((wait, wait.failed(_named(error)) if isinstance(error, known) else error))
            return None, True
        for wait in waits:
            told: Told | None
            if wait.ended:  # while the lake did not answer: a pin would be for nobody
                continue
            try:
                told = wait.look(pipeline, lookout)
            except known as error:
                told = wait.failed(_named(error))
            except Exception as error:
                told = error
            self._found.append((wait, told))
        try:
            return lookout.question(), False
        except known:
            return None, True  # the next look meets it as well, and says so

    def _begun(self) -> tuple[Pipeline, SharedLookout]:
        from headwater.pipeline_file.pipeline import parse_pipeline, read_pipeline_file
        from headwater.waiting.lookout import SharedLookout

        self._text = read_pipeline_file(self._path)
        pipeline = parse_pipeline(self._text, self._path, os.environ)
        return pipeline, SharedLookout(pipeline)

    def _tell(self) -> None:
        """In the event loop: what the tick has found up to now."""
        while self._found:
            wait, told = self._found.popleft()
            if told is not None:
                wait.ended = wait.ended or isinstance(told, End | Exception)
                wait.told.put_nowait(told)

    async def _ask(self, question: Question) -> None:
        """Credentials are fetched for every question: they may have changed since the last one."""
        from headwater.errors import Transient
        from headwater.pipeline_file.pipeline import parse_pipeline

        assert self._ready is not None
        begun, lookout = self._ready
        conn_id = begun.source.airflow_connection
        try:
            async with asyncio.timeout(_ANSWER_SECONDS):
                environ = await async_connection_environment(conn_id) if conn_id is not None else {}
                known = {**os.environ, **environ}
                pipeline = await in_thread(self._path, parse_pipeline, self._text, self._path, known)
                await in_thread(self._path, lookout.answer, question, pipeline)
        except TimeoutError:
            lookout.bring(question, Transient(f"it has not answered for {_ANSWER_SECONDS:g} s", where="source"))
        except Exception as error:
            lookout.bring(question, _named(error))
        finally:
            self._wanted.set()


def _named(error: Exception) -> HeadwaterError:
    from headwater.errors import HeadwaterError, Refused, Transient

    if isinstance(error, HeadwaterError):
        return error
    if isinstance(error, AirflowNotFoundException):
        remedy = "create the connection"
        return Refused(str(error), code="no_connection", where="source.connection", remedy=remedy)
    if isinstance(error, OSError):  # the lake's store, or the pipeline file on it
        return Transient(f"{type(error).__name__}: {error.strerror or error}")
    if isinstance(error, AirflowRuntimeError):  # the API server, which is asked for the connection
        return Transient(str(error))
    return HeadwaterError(f"{type(error).__name__}: {error}", code="failed", where="source")


_groups: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[Hashable, Waits]] = WeakKeyDictionary()


async def told(path: str, wait: Wait) -> AsyncIterator[Word | End]:
    """What `wait` says among those of the same pipeline; the last of it is its End."""
    try:
        # A file that has changed is another pipeline: waits that began before keep what they began with.
        stamp = await _in_time(wait, in_thread(path, stamp_of, path))
    except TimeoutError:
        yield _silent("the pipeline file")
        return
    groups = _groups.setdefault(asyncio.get_running_loop(), {})
    key = path, stamp
    group = groups.setdefault(key, Waits(path))
    group.join(wait)
    try:
        while True:
            try:
                word = await _in_time(wait, wait.told.get())
            except TimeoutError:
                yield _silent("the lake")
                return
            if isinstance(word, Exception):
                raise word
            yield word
            if isinstance(word, End):
                return
    finally:
        if group.leave(wait):
            del groups[key]


async def _in_time(wait: Wait, coming: Awaitable[_T]) -> _T:
    return await asyncio.wait_for(coming, max(wait.remaining(), 0.0) + _ANSWER_SECONDS)


def _silent(what: str) -> End:
    from headwater.errors import Transient

    error = Transient(f"{what} cannot be read: it does not answer", remedy="see whether its storage is reachable")
    return End(error.to_json(), error.exit_status)


def stamp_of(path: str) -> Hashable:
    """What tells a file from one that was written since."""
    try:
        found = os.stat(path)
    except OSError:
        return None  # each wait is told so when it is read
    return found.st_mtime_ns, found.st_size
