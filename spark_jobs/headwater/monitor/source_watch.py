"""The source as the pages see it: one short visit, its answer kept for some seconds and shared by all who look.

A page must not wait for a source that does not answer. So a visit runs in a thread of its own, one at a time, and
only while somebody looks; whoever looks gets the last answer with its age, or why there is none.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass, replace

from headwater.errors import HeadwaterError
from headwater.lake.look import Look
from headwater.pipeline_file.pipeline import Pipeline
from headwater.source.catalog.matching import match_entries
from headwater.source.catalog.relations import list_relations
from headwater.source.catalog.standing import Registered
from headwater.source.connection import connect
from headwater.source.reading_now import jobs_there
from headwater.source.slot import wal_bound
from headwater.waiting.source_state import STATEMENT_SECONDS, SourceState, read_source_state

ASK_SECONDS = 4.0
"""An answer is used for so long before the source is asked again."""
LIST_SECONDS = 60.0
"""Which tables there are changes rarely, and a catalog of thousands takes its time."""
FIRST_SECONDS = 0.3
"""How long who looks waits for an answer, where there is none or only one of long ago."""
STALE_SECONDS = 30.0
"""An answer that is older says nothing any more."""


@dataclass(frozen=True, slots=True)
class SourceAnswer:
    """What the source said last. `state` None: it did not answer, and `outage` says why.

    `wal_bound`: bytes of log it keeps for the slot at most, by its own setting or our ceiling (None: no bound).
    `jobs`: the sessions of loads and reloads. `listed`: the tables there that the pipeline's entries match.
    `asked_at`: this process's monotonic clock when the visit began.
    """

    state: SourceState | None = None
    wal_bound: int | None = None
    jobs: frozenset[str] = frozenset()
    listed: frozenset[str] = frozenset()
    listed_at: float | None = None
    outage: str = "the source has not answered yet"
    asked_at: float | None = None


class SourceWatch:
    """Asks the source of `pipeline` for whoever looks. `conninfo` gives the connection string, anew for each visit:
    credentials change. From any thread."""

    def __init__(self, pipeline: Pipeline, conninfo: Callable[[], str]) -> None:
        self._pipeline = pipeline
        self._conninfo = conninfo
        self._lock = threading.Lock()
        self._asking: threading.Event | None = None
        self._answer = SourceAnswer()

    def latest(self, tables: list[Registered], look: Look, wait: float = FIRST_SECONDS) -> SourceAnswer:
        """The newest answer; a visit is begun when it is older than `ASK_SECONDS`. `tables`: those to ask about, by
        `look`. It is waited for, `wait` seconds at most, when nobody has looked for a while: else the last answer will
        do."""
        with self._lock:
            age = _age(self._answer)
            if age >= ASK_SECONDS and self._asking is None:
                self._asking = threading.Event()
                visit = threading.Thread(target=self._visit, args=(tables, look, self._asking), daemon=True)
                visit.name = f"headwater source of {self._pipeline.name}"
                visit.start()
            asking = self._asking
        if age >= 2 * ASK_SECONDS and asking is not None:
            asking.wait(wait)
        with self._lock:
            answer = self._answer
        if answer.state is not None and (age := _age(answer)) > STALE_SECONDS:
            # That may only mean that nobody has looked: a source that does not answer ends its visit and says so.
            return replace(answer, state=None, outage=f"the source is being asked; its last answer is {age:.0f} s old")
        return answer

    def visited(self, seconds: float) -> bool:
        """Whether no visit is under way any more, after `seconds` at most."""
        with self._lock:
            asking = self._asking
        return asking is None or asking.wait(seconds)

    def _visit(self, tables: list[Registered], look: Look, done: threading.Event) -> None:
        began = time.monotonic()
        before = self._answer
        try:
            answer = self._ask(tables, look, before, began)
        except HeadwaterError as error:
            answer = replace(before, state=None, outage=f"the source does not answer: {error.message}", asked_at=began)
        except Exception as error:
            # An answer of libpq or of Airflow's connections that nobody foresaw. Its text may quote what it was given.
            answer = replace(before, state=None, outage=f"asking the source failed: {type(error).__name__}")
            answer = replace(answer, asked_at=began)
        with self._lock:
            self._answer = answer
            self._asking = None
        done.set()

    def _ask(self, tables: list[Registered], look: Look, before: SourceAnswer, began: float) -> SourceAnswer:
        session = connect(
            self._conninfo(),
            application_name="headwater page",
            statement_timeout=STATEMENT_SECONDS,
            lock_timeout=STATEMENT_SECONDS,
        )
        with closing(session) as connection:
            state = read_source_state(connection, self._pipeline, tables).asked_behind(look)
            listed, listed_at = before.listed, before.listed_at
            if listed_at is None or began - listed_at >= LIST_SECONDS:
                matched, _ = match_entries(self._pipeline.tables, list_relations(connection))
                listed, listed_at = frozenset(str(relation.name) for relation, _ in matched), began
            bounds = (wal_bound(connection), self._pipeline.source.wal_ceiling)
            bound = min((size for size in bounds if size is not None), default=None)
            return SourceAnswer(state, bound, jobs_there(connection), listed, listed_at, "", began)


def _age(answer: SourceAnswer) -> float:
    return time.monotonic() - answer.asked_at if answer.asked_at is not None else float("inf")
