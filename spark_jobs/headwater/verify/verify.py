"""`headwater verify`: does the lake hold what the source held, row for row, while the source goes on writing?

Per table: a capture point at the source, the first lake version that holds everything up to it, and a compare of all
rows, each side read once. Rows that the log changed in between look different; so every key that does is looked at
again, at a second capture point and then at further ones, until either both sides agree or neither has moved and they
still differ.
Nothing is changed, neither here nor there, unless a repair is asked for (`headwater.verify.repair`).
"""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from pyspark.errors import PySparkException

from headwater.columns.changes import COLUMNS_CHANGED
from headwater.columns.selection import as_registered, registered_columns
from headwater.delta import small_versions
from headwater.delta.delta_log import read_snapshot
from headwater.delta.small_versions import TableUnreadable, refuse_lost
from headwater.errors import Refused, Transient
from headwater.gate import lease
from headwater.gate.check import check, require_ok
from headwater.gate.recovery import mended_registry
from headwater.gate.renamed import renamed_problems
from headwater.gate.same_source import require_same_source
from headwater.lake.paths import table_path
from headwater.lake.registry import Registry, TableRecord
from headwater.load.driver_answers import is_running
from headwater.load.source_rows import extents
from headwater.load.turns import SideBySide
from headwater.load.units import BAD_VALUE, CHANGED, LOCK_SECONDS, TableChanged, UnfitValue, bad_value, why_changed
from headwater.names import TableName
from headwater.pipeline_file.pipeline import Pipeline
from headwater.position import Position, format_lsn
from headwater.reload.replacing import driver_beside
from headwater.replicate.pausing import refuse_paused
from headwater.replicate.takeover.new_source import adopt, begin_behind_gap
from headwater.schema import TableSchema
from headwater.source.catalog.catalog import read_catalog, signature
from headwater.source.connection import Connection, connect
from headwater.source.problems import refuse_errors
from headwater.source.snapshots import capture_point
from headwater.spark.session import JobSpark, SparkOnDemand
from headwater.verify.candidates import Candidates
from headwater.verify.comparison import Comparison, comparison_of
from headwater.verify.repair import Repair, repair_suspended
from headwater.verify.settle import Settled, State, settle
from headwater.verify.sides import Sides, sides_of
from headwater.verify.version import DEFAULT_PATIENCE, Patience, Versions

log = logging.getLogger(__name__)

ROUNDS = 8
SHOWN_KEYS = 20
_CANDIDATES = 100_000
_ATTEMPTS = 5
_SIDE_BY_SIDE = 4
"""Sessions at the source at once, each with a snapshot of its own for as long as one small table takes."""

Found = TypeVar("Found")


class _NotCompared(Exception):
    """This table cannot be compared now, for the reason given."""


class _Moved(Exception):
    """The table was rewritten or altered between the capture point and the reading: take another capture point."""


class _Reshaped(Exception):
    """The lake's table has other columns than what is compared: compare it anew, in these."""


@dataclass(frozen=True, slots=True)
class _Look:
    """Both sides at one moment, readable inside the block that gave it."""

    position: Position
    epoch: int | None
    sides: Sides


def verify(
    pipeline: Pipeline,
    tables: Sequence[TableName] = (),
    repair: bool = False,
    *,
    new_source: bool = False,
    patience: Patience = DEFAULT_PATIENCE,
    stop: threading.Event | None = None,
) -> dict[str, Any]:
    """Compare `tables` (none: every table of the pipeline). The JSON of interface "verify"; `position` is the first
    capture point of all.

    A table that cannot be compared is listed with `compared: false`, its state and the reason. `repair`: rows that
    differ are put right, and a slot that was lost is made anew first. `new_source`: this server is the lake's source
    from now on. `stop`: no further table is begun. Transient when the lake does not reach the capture point in time;
    Refused, with nothing changed, for a repair while the pipeline is paused.
    """
    opened = mended_registry(pipeline) if repair else None
    if opened is not None:
        refuse_paused(opened, "headwater replicate")  # before a new slot is made, which no driver could read
    if opened is not None and opened.pipeline is not None and tables and not new_source:
        refuse_errors(renamed_problems(pipeline, opened.pipeline))  # a switch takes all tables out of step
    if new_source:
        adopt(pipeline, ())  # a table's own faults keep that table from its repair, and no other
    elif repair and (gap := begin_behind_gap(pipeline)):
        log.warning("%s: the log goes on with a new slot, and every table is compared", gap)
    with (
        contextlib.closing(
            connect(pipeline.conninfo(), application_name="headwater verify", lock_timeout=LOCK_SECONDS)
        ) as connection,
        driver_beside(connection, pipeline, log.info) if repair else contextlib.nullcontext(),
    ):
        registry = open_compared(pipeline, connection, tables)
        names = [str(name) for name in tables]
        if not tables:
            known = {str(table.name) for table in read_catalog(connection, pipeline).tables}
            known |= {name for name, record in registry.tables.items() if record.state != "removed"}
            names = sorted(known)
        spark = JobSpark(pipeline.name, "verify", pipeline.lake_path())  # for the first large table, if any

        def work(mine: Iterator[str]) -> Iterator[_Table]:
            """In whichever thread."""
            session = spark.for_thread()
            look = connect(pipeline.conninfo(), application_name="headwater verify", lock_timeout=LOCK_SECONDS)
            with contextlib.closing(look) as own:
                versions = Versions(pipeline, registry, own, patience)
                for name in mine:
                    if stop is None or not stop.is_set():
                        table = _Table(pipeline, registry, own, name, versions, repair, session)
                        table.result = table.run()
                        yield table

        # A repair may load, and without a driver the slot is looked into: both one at a time.
        beside = not repair and is_running(connection, pipeline)
        small = _small(connection, registry, names) if beside else []
        done = SideBySide(small, work).run(_SIDE_BY_SIDE)
        done += work(iter([name for name in names if name not in set(small)]))
    first = min((check.first for check in done if check.first), key=lambda seen: seen[0].lsn, default=None)
    results = {check.name: check.result for check in done}
    return {
        "position": first[0].to_json() if first else None,
        "epoch": first[1] if first else None,
        "tables": {name: results[name] for name in names if name in results},
    }


def _small(connection: Connection, registry: Registry, names: Sequence[str]) -> list[str]:
    """Of the tables `names` those that are compared without Spark: what they cost is mostly waiting, for the lake to
    reach a capture point. Large ones each ask much of the source, and take all executors."""
    found = []
    for name in names:
        record = registry.tables.get(name)
        leaves = [leaf.relation_id for leaf in record.schema.leaves] if record is not None and record.schemas else []
        try:
            size = sum(extent.bytes for extent in extents(connection, leaves).values())
        except Transient as error:
            if error.code != "lock_timeout":
                raise
            continue  # somebody has locked it: it comes behind the others
        if size < small_versions.SMALL_BYTES:
            found.append(name)
    return found


def open_compared(pipeline: Pipeline, connection: Connection, tables: Sequence[TableName]) -> Registry:
    """The registry, with tables that can be compared, all `tables` among them: Refused else, and for another source."""
    registry = mended_registry(pipeline, connection)
    loaded = [] if registry is None else [n for n, r in registry.tables.items() if r.holds_rows]
    missing = [str(name) for name in tables if str(name) not in loaded]
    if registry is None or registry.pipeline is None or not loaded or missing:
        raise Refused(
            f"not loaded: {', '.join(missing)}" if missing else "no table is loaded",
            code="nothing_loaded",
            where=f"pipeline {pipeline.name}",
            remedy="headwater load PIPELINE.yaml",
        )
    require_same_source(connection, pipeline, registry.pipeline)
    return registry


class _Table:
    """The check of one table. `first`: capture position and epoch of the full compare; `result`: its JSON, when it is
    through."""

    def __init__(
        self,
        pipeline: Pipeline,
        registry: Registry,
        connection: Connection,
        name: str,
        versions: Versions,
        repair: bool,
        spark: SparkOnDemand,
    ) -> None:
        self._pipeline, self._registry, self._connection, self._spark = pipeline, registry, connection, spark
        self.name = name
        self._versions, self._repair = versions, repair
        self.result: dict[str, Any] = {}
        self.first: tuple[Position, int | None] | None = None

    def run(self) -> dict[str, Any]:
        record = self._registry.tables.get(self.name)
        if record is None or not record.holds_rows:
            return self._result(record.state if record else "new", record.reason if record else "it was never loaded")
        if self._is_to_be_loaded():
            return self._repaired_by_load()
        try:
            rows, candidates, settled = self._compare_as_it_is()
        except _NotCompared as reason:
            if self._is_to_be_loaded():
                return self._repaired_by_load()
            return self._result(self._record().state, str(reason))
        not_repaired = "it was not asked for"
        repaired = 0
        if self._repair and settled.differing:
            if self._is_to_be_loaded():
                return self._repaired_by_load()
            not_repaired = self._why_not_repaired()
            if not not_repaired and any(state.lake.count > 1 for state in settled.differing.values()):
                # By its key the log finds one of the rows.
                return self._repaired_by_load("a key is there more than once")
            if not not_repaired and candidates.more:
                return self._repaired_by_load(f"more than {_CANDIDATES} keys differ")
            if not not_repaired:
                numbers = sorted(settled.differing)
                work = (self._pipeline, self._registry, self._connection, self._record(), candidates, numbers)
                repaired = Repair(*work).run()
        result = self._result(self._record().state, self._record().reason, rows, candidates, settled)
        result["repaired"] = repaired
        if self._repair and settled.differing and not repaired:
            result["not_repaired"] = not_repaired
        return result

    def _is_to_be_loaded(self) -> bool:
        """A repair was asked for, and the table is suspended: perhaps since the driver has looked at it. Or a repair of
        it was killed. One that has left the pipeline file is not loaded."""
        self._registry.refresh()
        state = self._record().state
        if not self._repair or state not in ("suspended", "loading"):
            return False
        if self._pipeline.entry_for(TableName.parse(self.name)) is None:
            return False
        return state == "suspended" or not lease.is_held(self._connection, self._registry, lease.LOAD)

    def _repaired_by_load(self, why: str = "") -> dict[str, Any]:
        reason = why or self._record().reason or self._record().state
        log.info("%s: it is compared (%s), repaired, and handed over to the log again", self.name, reason)
        try:
            found = repair_suspended(self._pipeline, TableName.parse(self.name), SHOWN_KEYS, log.info)
        except Refused as refused:
            if type(refused) is not Refused:
                raise  # a slot that is lost, another source, a damaged lake
            require_ok(check(self._pipeline), ())  # what keeps every table from being repaired ends the command
            return self._result(self._record().state, f"it cannot be repaired: {refused.message}")
        self._registry.refresh()
        record = self._record()
        if found.position is not None:
            self.first = (found.position, None)
        result = self._result(record.state, record.reason)
        return result | {
            "capture_lsn": format_lsn(found.position.lsn) if found.position is not None else None,
            "rows": found.rows,
            "missing": found.missing,
            "extra": found.extra,
            "different": found.different,
            "repaired": found.repaired if record.state != "suspended" else 0,
            "keys": found.keys,
            "compared": record.state != "suspended",
            **({"written_anew": found.whole} if found.whole else {}),
        }

    def _why_not_repaired(self) -> str:
        """Why keys that differ are left as they are; empty: they need not be."""
        record = self._record()
        again = f"headwater load PIPELINE.yaml --table {self.name} --again"
        if record.schema.soft_delete or record.schema.history:
            return (
                f"what a repair changes is in no transaction of the source, whose deletes and history it keeps; {again}"
            )
        if record.schema.insert_only or not record.schema.key:
            return f"it has no key to find rows by; headwater reload PIPELINE.yaml --table {self.name}"
        return ""

    def _record(self) -> TableRecord:
        return self._registry.tables[self.name]

    def _compare_as_it_is(self) -> tuple[int, Candidates, Settled]:
        for _ in range(_ATTEMPTS):
            try:
                return self._compare(self._record().schema.without_marks())
            except _Reshaped:
                log.info("%s: a rebuild has given it other types; comparing it again", self.name)
        raise self._not_read("its types in the lake changed")

    def _not_read(self, why: str) -> _NotCompared:
        return _NotCompared(
            f"each of {_ATTEMPTS} attempts to read the table failed, the last one because {why}; verify it again when "
            "nothing alters or locks it, or with a longer load.max_snapshot_age"
        )

    def _compare(self, schema: TableSchema) -> tuple[int, Candidates, Settled]:
        def full(look: _Look) -> tuple[Comparison, int, Candidates]:
            self.first = (look.position, look.epoch)
            chosen = comparison_of(look.sides, self._spark)
            return chosen, *chosen.first_look(look.sides, _CANDIDATES)

        comparison, rows, candidates = self._look(schema, full)
        count = candidates.keys.num_rows
        log.info("%s: %s rows, %s keys to look at again", self.name, rows, count)

        def again(numbers: Sequence[int]) -> dict[int, State]:
            return self._look(schema, lambda look: comparison.look_again(look.sides, candidates, numbers))

        settled = settle(range(count), again, ROUNDS)
        if settled.unsettled:  # most often hot rows that are equal, so they fail nothing
            found = len(settled.unsettled)
            log.warning("%s: keys not known to be equal, since each look found them changed: %s", self.name, found)
        return rows, candidates, settled

    def _look(self, schema: TableSchema, work: Callable[[_Look], Found]) -> Found:
        """`work` at a new capture point; again at another one when the table was rewritten meanwhile."""
        why = ""
        for _ in range(_ATTEMPTS):
            try:
                with self._both_sides(schema) as look:
                    return work(look)
            except (_Moved, TableChanged) as moved:
                why = str(moved).removeprefix(CHANGED + ": ")
            except (PySparkException, UnfitValue) as error:
                if BAD_VALUE in str(error):
                    raise _NotCompared(bad_value(str(error), self.name, schema).message) from error
                if CHANGED not in str(error):
                    self._refuse_lost()
                    raise
                why = why_changed(str(error))
            except TableUnreadable as damage:
                raise self._damaged(damage) from damage
            log.info("%s: %s; taking another capture point", self.name, why)
        raise self._not_read(why)

    def _refuse_lost(self) -> None:
        """Where Spark could not read the table: _NotCompared if that is for a file that is missing."""
        place = table_path(self._pipeline.lake_path(), self._record().path)
        try:
            refuse_lost(read_snapshot(place))
        except TableUnreadable as damage:
            raise self._damaged(damage) from damage

    def _damaged(self, damage: TableUnreadable) -> _NotCompared:
        return _NotCompared(f"{damage}; headwater load PIPELINE.yaml --table {self.name} --again")

    @contextlib.contextmanager
    def _both_sides(self, schema: TableSchema) -> Iterator[_Look]:
        before = self._schema_now()
        with capture_point(self._pipeline.conninfo(), self._pipeline.load.max_snapshot_age) as capture:
            signatures = signature(self._connection, [leaf.relation_id for leaf in before.leaves])
            # An old snapshot sees a rewritten table as empty: nothing may have happened between these two looks.
            if self._schema_now() != before:
                raise _Moved("its definition changed")
            with self._versions.holding(self.name, capture.position) as stored:
                if stored is None:
                    raise _NotCompared(self._record().reason or f"it is {self._record().state}")
                if before.columns != schema.columns:
                    raise _Reshaped
                at = (self._pipeline, self._connection, before, capture.snapshot_id, signatures)
                sides = sides_of(*at, stored.path, stored.version)
                if not sides.same_types:
                    # A rebuild has committed since: after the capture point, or between this version and the registry.
                    self._registry.refresh()
                    if self._record().schema.without_marks().columns != schema.columns:
                        raise _Reshaped
                    raise _Moved("its types in the lake are being changed (replicate ends a change that was cut short)")
                yield _Look(capture.position, stored.epoch, sides)

    def _schema_now(self) -> TableSchema:
        """The lake's schema of the table with the leaves that it has at the source now."""
        record = self._record()
        stored, name = record.schema, TableName.parse(self.name)
        catalog = read_catalog(self._connection, as_registered(self._pipeline, [record]), name)
        found = next((registered_columns(t.schema, record) for t in catalog.tables if t.name == name), None)
        if found is None:
            reasons = "; ".join(map(str, catalog.errors_of(name)))
            raise _NotCompared(reasons or "the source has no such table any more")
        if found.relation_id != stored.relation_id:
            raise _NotCompared("the table was dropped and created again at the source")
        if found.definition != stored.definition:
            raise _NotCompared(COLUMNS_CHANGED)
        return stored.without_marks().with_leaves(found.leaves)

    def _result(
        self,
        state: str,
        reason: str,
        rows: int | None = None,
        candidates: Candidates | None = None,
        settled: Settled | None = None,
    ) -> dict[str, Any]:
        differing = settled.differing if settled is not None else {}
        listed = sorted(differing)[:SHOWN_KEYS]
        assert candidates is not None or not listed
        position, epoch = self.first or (None, None)
        return {
            "rows": rows,
            "missing": sum(found.missing for found in differing.values()),
            "extra": sum(found.extra for found in differing.values()),
            "different": sum(found.different for found in differing.values()),
            "repaired": 0,
            "keys": [{"key": candidates.shown(i), "kind": differing[i].kind} for i in listed] if candidates else [],
            "unsettled": (len(settled.unsettled) if settled else 0) + (candidates.more if candidates else 0),
            **({"more": candidates.more} if candidates and candidates.more else {}),
            "compared": rows is not None,
            "state": state,
            "reason": reason,
            "capture_lsn": format_lsn(position.lsn) if position and rows is not None else None,
            "epoch": epoch if rows is not None else None,
        }
