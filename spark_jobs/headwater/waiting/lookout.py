"""What the waits of one pipeline see: its lake, and the source as it answered last.

A wait of its own has a `Lookout` of its own, which asks when it is told to. The waits of a triggerer share one: until
`refresh`, one look at the lake is for all of them, and so is an answer of the source. A source may take its time to
answer while most waits only need the lake: there questions are left to the lookout's owner.
"""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, replace

from headwater.errors import HeadwaterError, Transient
from headwater.lake.look import Look
from headwater.lake.looks import often
from headwater.lake.reader import LakeReader
from headwater.pipeline_file.pipeline import Pipeline
from headwater.source.catalog.partitions import NamedPart
from headwater.source.catalog.standing import Registered
from headwater.waiting.source_state import SourceState, as_the_source_stands, ask_source, followed

_ANEW_SECONDS = 600.0
"""A reader follows what it has read, and would never see a lake that is made anew: waits that overlap could keep one
for ever."""


class Lookout:
    """For one wait. `source`: the last answer; `outage`: why the last question had none. `lake`: a reader that somebody
    has used before. `longest_pause`: seconds between two looks, where each costs money."""

    def __init__(self, pipeline: Pipeline, lake: LakeReader | None = None) -> None:
        self._pipeline = pipeline
        self.longest_pause = often(pipeline.lake_path()).wait[1]
        self.lake = lake or self._new_reader()
        self.source: SourceState | None = None
        self.outage = ""
        self._seen: Look | None = None
        self._standing: tuple[Look, SourceState | None, Look] | None = None
        self._registered: dict[tuple[str, ...], list[Registered]] = {}

    def _new_reader(self) -> LakeReader:
        return LakeReader(self._pipeline.lake_path(), self._pipeline.name)

    def refresh(self) -> None:
        """The next look is a new one."""
        self._seen = None
        self._registered.clear()

    def look(self) -> Look:
        """The lake, and its tables as the source stands."""
        if self._seen is None:
            self._seen = self.lake.look()
        if self._standing is None or self._standing[0] is not self._seen or self._standing[1] is not self.source:
            standing = as_the_source_stands(self._seen, self.source, self.registered)
            if self._standing is not None and self._standing[2].tables == standing.tables:
                # The same object as long as nothing has changed: waits see it at a glance.
                standing = replace(standing, tables=self._standing[2].tables)
            self._standing = self._seen, self.source, standing
        return self._standing[2]

    def registered(self, tables: Collection[str] = ()) -> list[Registered]:
        """What the source is asked about those of `tables` (none: all) that follow the log now. Looked up once for all
        waits that ask alike: each time the registry's log is listed."""
        asked = tuple(sorted(tables))
        if asked not in self._registered:
            self._registered[asked] = followed(self.lake.registry(), self._pipeline.source.publication, tables)
        return self._registered[asked]

    def ask(self, tables: Collection[str], not_before: float, pause: float, parts: Collection[NamedPart] = ()) -> bool:
        """Have `source` be an answer about `tables` and `parts` that was asked for after the moment `not_before` and is
        not older than `pause` seconds; False as long as that is under way. SourceUnreachable, other Transient, or
        Refused."""
        question, seen = self.registered(tables), self.look()
        try:
            self._take(ask_source(self._pipeline, question, parts).asked_behind(seen))
        except HeadwaterError as error:
            self._take(error)
            raise
        return True

    def _take(self, answer: SourceState | HeadwaterError) -> None:
        if isinstance(answer, SourceState):
            self.source, self.outage = answer, ""
        elif isinstance(answer, Transient):
            self.outage = answer.message


@dataclass(frozen=True, slots=True)
class Question:
    """About the tables and partitions of so many waits that it is asked once for all of them. `seen`: the look before
    it."""

    tables: frozenset[str]
    parts: frozenset[NamedPart]
    registered: list[Registered]
    seen: Look
    asked_at: float

    def covers(self, tables: Collection[str], parts: Collection[NamedPart]) -> bool:
        return self.tables.issuperset(tables) and self.parts.issuperset(parts)


@dataclass(frozen=True, slots=True)
class _Answer:
    question: Question
    answered_at: float
    content: SourceState | HeadwaterError


class SharedLookout(Lookout):
    """For many waits in one thread, whose questions wait in `question` for the lookout's owner."""

    def __init__(self, pipeline: Pipeline) -> None:
        super().__init__(pipeline)
        self._wanted: frozenset[str] = frozenset()
        self._wanted_parts: frozenset[NamedPart] = frozenset()
        self._asked = False
        self._brought: _Answer | None = None
        self._answer: _Answer | None = None
        self._is_new = False
        self._began_at = time.monotonic()

    def refresh(self) -> None:
        super().refresh()
        if time.monotonic() - self._began_at > _ANEW_SECONDS:
            self.lake, self._began_at = self._new_reader(), time.monotonic()
        self._is_new = self._brought is not self._answer
        if self._is_new and self._brought is not None:
            self._answer = self._brought
            self._take(self._answer.content)

    def ask(self, tables: Collection[str], not_before: float, pause: float, parts: Collection[NamedPart] = ()) -> bool:
        known = self._answer
        # One that has just come counts however long the look takes in which it is judged.
        if known is not None and (self._is_new or time.monotonic() - known.answered_at <= pause):
            mine = known.question.asked_at >= not_before
            if isinstance(known.content, HeadwaterError) and (mine or isinstance(known.content, Transient)):
                raise known.content.with_traceback(None)  # by many waits, each time with more of it
            if isinstance(known.content, SourceState) and mine and known.question.covers(tables, parts):
                return True
        self._wanted |= frozenset(tables)
        self._wanted_parts |= frozenset(parts)
        self._asked = True
        return False

    def question(self) -> Question | None:
        """What is to be asked now, if anything; from the waits' thread."""
        if not self._asked:
            return None
        self._asked = False
        registered = self.registered(self._wanted)
        return Question(self._wanted, self._wanted_parts, registered, self.look(), time.monotonic())

    def answer(self, question: Question, pipeline: Pipeline) -> None:
        """Ask the source, as `pipeline` names it now. From any thread."""
        try:
            self.bring(question, ask_source(pipeline, question.registered, question.parts).asked_behind(question.seen))
        except HeadwaterError as error:
            self.bring(question, error)

    def bring(self, question: Question, content: SourceState | HeadwaterError) -> None:
        """An answer; it counts from the next `refresh` on."""
        self._brought = _Answer(question, time.monotonic(), content)
