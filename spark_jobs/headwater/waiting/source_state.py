"""One short visit of a waiting reader to the source: where its log ends, what its clock says, does the driver live.

The position is asked first and the marker written after it: the marker lies at or above the position, is flushed,
and seals the driver's open batch, so whoever waits for the position is served at once, also where nothing else
writes. Where no marker can be written (no right) the driver's own pace is the bound. A standby is no source to ask:
what it has replayed may be less than was committed before the wait.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable
from contextlib import closing
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING

from headwater.errors import Refused
from headwater.gate.wal_ceiling import REMEDY, give_up_if_beyond
from headwater.lake.look import Look, ReportedState
from headwater.names import TableName
from headwater.pipeline_file.pipeline import Pipeline
from headwater.position import Position
from headwater.source.catalog.partitions import Leaves, NamedPart, read_leaves
from headwater.source.catalog.standing import Registered, Standing, read_standings, standing_problem
from headwater.source.connection import Connection, connect
from headwater.source.problems import Problem, error
from headwater.source.publication.publication import inserts_name
from headwater.source.samples import emit_marker, insert_position, take_sample
from headwater.source.slot import SlotState, loss_of, read_slot
from headwater.source.snapshots import OpenTransaction, open_now

if TYPE_CHECKING:
    from headwater.lake.registry import Registry, TableRecord

STATEMENT_SECONDS = 5.0
_NO_MARKER = frozenset({"cannot_mark", "not_authorised"})


@dataclass(frozen=True, slots=True)
class SourceState:
    """What the source answered. `asked_at`: this process's monotonic clock just before its clock was asked.

    `standings` are later than `position`: a table that is there and published then has sent its changes up to it.
    `lake`: where the lake stood before the source was asked, as far as it was looked at.
    """

    position: Position
    sample: tuple[datetime, int]
    asked_at: float
    slot: SlotState | None
    standings: tuple[Standing, ...] = ()
    open_transactions: tuple[OpenTransaction, ...] = ()
    leaves: Leaves = field(default_factory=dict)
    lake: Position | None = None

    def asked_behind(self, look: Look) -> SourceState:
        """This answer, which was asked for after `look`."""
        return replace(self, lake=look.file.position if look.file is not None else None)

    @property
    def is_older(self) -> bool:
        """Whether its log ends before what the lake has of it: it was put back to an older state, and what is committed
        now gets positions that the lake passed long ago."""
        return self.lake is not None and self.lake.same_log(self.position) and self.position.lsn < self.lake.lsn

    def is_of(self, log: tuple[str, int] | None) -> bool:
        """Whether its positions are those of a lake that follows `log` (None: there is none yet)."""
        return log in (None, self.log) and not self.is_older

    @property
    def log(self) -> tuple[str, int]:
        """(system id, timeline) of its positions."""
        return self.position.system_id, self.position.timeline

    def samples(self, log: tuple[str, int] | None) -> list[tuple[datetime, int]]:
        """Its sample, for a lake that follows `log`. None of another log: a server that was promoted, or another one,
        may stand at a lower LSN than the lake and yet hold what the lake lacks."""
        return [self.sample] if self.is_of(log) else []

    def now(self) -> datetime:
        """The source's clock, carried on by our own; never behind it by more than the drift of the two clocks,
        since the way of the answer is counted as passed: a staleness is rather over- than underrated."""
        return self.sample[0] + timedelta(seconds=time.monotonic() - self.asked_at)


def registered(records: Iterable[TableRecord], publication: str) -> list[Registered]:
    """What the source is asked about the tables of `records`; `publication` is the pipeline's."""
    both = (publication, inserts_name(publication))
    return [
        Registered(
            TableName.parse(record.name),
            record.schema.relation_id,
            both[record.schema.insert_only],
            record.membership,
        )
        for record in records
    ]


def followed(registry: Registry | None, publication: str, names: Collection[str] = ()) -> list[Registered]:
    """The tables among `names` (none: all) that follow the log now."""
    tables = registry.tables.values() if registry is not None else ()
    wanted = [t for t in tables if t.schemas and t.is_followed and (not names or t.name in names)]
    return registered(wanted, publication)


def as_the_source_stands(look: Look, source: SourceState | None, now: Callable[[], Iterable[Registered]]) -> Look:
    """`look` without trust in tables that fell silent: a driver may not have noticed it yet, or none may live.

    `now` gives the tables that follow the log now: what was asked about one that was loaded anew since is void.
    """
    same_log = source is not None and source.is_of(look.log)
    found = [(s.registered, _problem_of(s, source, same_log)) for s in source.standings] if source is not None else []
    if not any(problem for _, problem in found):
        return look
    current, tables = {table.name: table for table in now()}, dict(look.tables)
    for table, problem in found:
        name = str(table.name)
        if problem is not None and current.get(table.name, table) == table and name in tables:
            # Since it was seen: when it came about nobody knows.
            assert source is not None
            since = source.now().astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
            tables[name] = ReportedState("suspended", problem.message, problem.remedy, since, tables[name].path)
    return replace(look, tables=tables)


def _problem_of(standing: Standing, source: SourceState, same_log: bool) -> Problem | None:
    """What the table lost at the source, or all of them with the slot (which another server need not have)."""
    if same_log and (loss := loss_of(source.slot)):
        return error("slot_gap", str(standing.registered.name), loss, REMEDY)
    return standing_problem(standing)


def ask_source(
    pipeline: Pipeline, registered: Iterable[Registered] = (), parts: Iterable[NamedPart] = ()
) -> SourceState:
    """Connect, ask, also which leaves `parts` have, write a marker, and leave. SourceUnreachable, other Transient, or
    Refused."""
    session = connect(
        pipeline.conninfo(),
        application_name="headwater wait",
        statement_timeout=STATEMENT_SECONDS,
        lock_timeout=STATEMENT_SECONDS,
    )
    with closing(session) as connection:
        state = read_source_state(connection, pipeline, registered)
        state = replace(state, leaves=read_leaves(connection, parts))
        try:
            emit_marker(connection)
        except Refused as error:
            if error.code not in _NO_MARKER:
                raise
        return state


def read_source_state(
    connection: Connection, pipeline: Pipeline, registered: Iterable[Registered] = (), *, look_only: bool = False
) -> SourceState:
    """The answers alone: nothing is written. SourceUnreachable (`in_recovery`) at a standby. A slot past its ceiling is
    given up, unless this is to `look_only`, and then there is none."""
    position = insert_position(connection)
    asked_at = time.monotonic()
    sample = take_sample(connection)
    clock = (sample.time, sample.lsn)
    found = read_slot(connection, pipeline.source.slot)
    if not look_only:
        found = give_up_if_beyond(connection, pipeline, found)
    standings = read_standings(connection, registered)
    return SourceState(position, clock, asked_at, found, standings, tuple(open_now(connection)))
