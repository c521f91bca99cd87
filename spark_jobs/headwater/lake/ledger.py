"""The ledger of epochs: `<root>/_headwater/ledger`, the truth about what the lake contains at which position.

A row `kind = "epoch"` says: at `to_lsn` the lake is exactly these table versions. A row carries the touched tables;
the first of a generation and every hundredth epoch carry all (`complete`). A row `kind = "generation"` is the
fence: it is committed when a driver starts, under `txn(headwater/<pipeline>/generation, g)`, and a driver that
loses a commit race and finds a higher generation stops for good.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headwater.delta.delta_log import read_snapshot
from headwater.delta.small_tables import (
    Bounds,
    LostRace,
    SmallTable,
    append_once,
    create_table,
    newest_first,
    open_table,
    read_rows,
)
from headwater.errors import Fenced
from headwater.lake.look import IN_STEP
from headwater.lake.paths import ledger_path
from headwater.position import Position

COMPLETE_EVERY = 100
_LATELY = 300
_EPOCHS: Bounds = {"kind": ("epoch", "epoch")}
_BEGINNING = datetime(1970, 1, 1, tzinfo=UTC)
_NEVER = (1 << 63) - 1
Int64 = npt.NDArray[np.int64]

_TABLE = pa.struct(
    [
        ("version", pa.int64()),
        ("applied_lsn", pa.int64()),
        ("state", pa.string()),
        ("rows", pa.int64()),
        ("apply_path", pa.string()),
        ("touched", pa.bool_()),
    ]
)
_TIME = pa.timestamp("us", "UTC")
_SCHEMA = pa.schema(
    [
        ("kind", pa.string()),
        ("epoch", pa.int64()),
        ("generation", pa.int64()),
        ("timeline", pa.int64()),
        ("system_id", pa.string()),
        ("from_lsn", pa.int64()),
        ("to_lsn", pa.int64()),
        ("source_time", _TIME),
        ("sample_time", _TIME),
        ("sample_lsn", pa.int64()),
        ("applied_at", _TIME),
        ("complete", pa.bool_()),
        ("tables", pa.map_(pa.string(), _TABLE)),
        ("stages", pa.map_(pa.string(), pa.float64())),
        ("lag_seconds", pa.float64()),
    ]
)
"""`lag_seconds`: how far the lake was behind just before the row. Rows of older versions do not have it."""


@dataclass(frozen=True, slots=True)
class TableVersion:
    """A table in an epoch. `rows`: changes applied in it; `state`: the table's state at that moment. `incarnation`: of
    its load, which may have begun the table anew; it is the driver's alone, and in no row."""

    version: int
    applied_lsn: int
    state: str
    rows: int = 0
    apply_path: str = ""
    touched: bool = False
    incarnation: int = field(default=0, compare=False)

    @property
    def age(self) -> tuple[int, int]:
        """A later version of the table has a greater one."""
        return self.incarnation, self.version


@dataclass(frozen=True, slots=True)
class Epoch:
    """One published epoch; `tables` is complete when read with `read_epoch`."""

    epoch: int
    generation: int
    position: Position
    from_lsn: int
    source_time: datetime | None
    sample: tuple[datetime, int] | None
    applied_at: datetime
    tables: Mapping[str, TableVersion] = field(default_factory=dict)

    def shows(self, name: str) -> bool:
        """Whether the table was in step there. What the registry says of it now may be of a row that is yet to come."""
        held = self.tables.get(name)
        return held is not None and held.state == IN_STEP


class Ledger:
    """The driver's hold on the ledger: one generation, rows strictly in order."""

    def __init__(self, root: str, pipeline: str) -> None:
        # Two handles: what `publish` commits on may only move by our own commits, or behind a look at the fence. Were
        # it moved by a mere look, a row of ours could land on top of a successor's generation without a lost race.
        self._table = create_table(ledger_path(root), _SCHEMA)
        self._watched = self._table.twin()
        self._watching = threading.Lock()
        self._pipeline = pipeline
        self.generation = 0
        self.newest = _newest_epoch(self._table)
        self._read_at = self._table.version()
        self._first_of_generation = True

    def refresh(self) -> set[str]:
        """Before `begin_generation`: take in what another driver has published since; the tables that it touched."""
        self._table.look()
        if self._table.version() == self._read_at:
            return set()
        known = self.newest.epoch if self.newest else 0
        self.newest = _newest_epoch(self._table)
        self._read_at = self._table.version()
        return _touched(self._table, known)

    def touched_lately(self) -> set[str]:
        """The tables that the last rows name as changed."""
        return _touched(self._table, (self.newest.epoch if self.newest else 0) - _LATELY)

    def begin_generation(self, position: Position, above: int = 0) -> int:
        """Raise the fence: from this commit on, every driver of an older generation is out, also of `above`."""
        app = self.generation_app
        while True:
            generation = max(self._table.transaction_version(app) or 0, above) + 1
            row = _row("generation", None, generation, position, {}, complete=False)
            try:
                append_once(self._table, [row], _SCHEMA, {app: generation})
            except LostRace:
                self._table.look()
                continue
            self.generation = generation
            # Rows that a predecessor committed between our first look and the fence are part of the truth.
            if self._table.version() != self._read_at + 1:
                self.newest = _newest_epoch(self._table)
            return generation

    def publish(
        self,
        position: Position,
        tables: Mapping[str, TableVersion],
        *,
        all_tables: Mapping[str, TableVersion],
        source_time: datetime | None,
        sample: tuple[datetime, int] | None,
        stages: Mapping[str, float],
        lag: float | None = None,
    ) -> Epoch:
        """Append the next epoch's row; Fenced when a newer generation has taken over."""
        number = (self.newest.epoch if self.newest else 0) + 1
        complete = self._first_of_generation or number % COMPLETE_EVERY == 0
        row = _row(
            "epoch",
            number,
            self.generation,
            position,
            dict(all_tables) if complete else dict(tables),
            complete=complete,
            from_lsn=self.newest.position.lsn if self.newest else 0,
            source_time=source_time,
            sample=sample,
            stages=stages,
            lag=lag,
        )
        while True:
            # Also behind a look that failed: it may have passed a successor's generation.
            self._refuse_if_fenced(self._table)
            try:
                append_once(self._table, [row], _SCHEMA, {f"headwater/{self._pipeline}/epoch": number})
                break
            except LostRace:
                self.check_fence()
                self._table.look()
        self._first_of_generation = False
        self.newest = epoch_of(row, all_tables)
        return self.newest

    def check_fence(self) -> None:
        """Look at the ledger anew: Fenced when a newer generation has begun. From any thread."""
        with self._watching:
            self._watched.look()
            self._refuse_if_fenced(self._watched)

    def _refuse_if_fenced(self, table: SmallTable) -> None:
        current = table.transaction_version(self.generation_app) or 0
        if current != self.generation:
            raise Fenced(
                f"generation {current} has taken over from generation {self.generation}",
                where=f"pipeline {self._pipeline}",
                remedy="nothing: the newer driver goes on from the ledger",
            )

    @property
    def generation_app(self) -> str:
        """The appId under which generations are counted, in the ledger and in every table's commits."""
        return generation_app(self._pipeline)


def generation_app(pipeline: str) -> str:
    """The appId under which a pipeline's generations are counted."""
    return f"headwater/{pipeline}/generation"


def read_epoch(root: str, epoch: int | None = None) -> Epoch | None:
    """Epoch `epoch` (the newest: None) with all its tables; None when there is no such row."""
    table = open_table(ledger_path(root))
    if table is None:
        return None
    return _newest_epoch(table) if epoch is None else _epoch_at(table, epoch)


def read_epoch_up_to(root: str, lsn: int) -> Epoch | None:
    """The newest epoch at or below `lsn`, with all its tables; None when there is none."""
    table = open_table(ledger_path(root))
    newest = _newest_epoch(table) if table is not None else None
    if table is None or newest is None or newest.position.lsn <= lsn:
        return newest
    found = next(newest_first(table, "epoch", {**_EPOCHS, "to_lsn": (None, lsn)}, []), None)
    return None if found is None else _epoch_at(table, found["epoch"][0].as_py())


def epoch_at_version(root: str, version: int) -> Epoch | None:
    """The newest epoch in `version` of the ledger's table."""
    return _newest_epoch(SmallTable(read_snapshot(ledger_path(root), version))) if version >= 0 else None


def read_generation(root: str, pipeline: str) -> int:
    """The newest generation; 0 when no driver ever started."""
    table = open_table(ledger_path(root))
    return (table.transaction_version(generation_app(pipeline)) or 0) if table is not None else 0


def read_all(root: str) -> list[Epoch]:
    """Every published epoch in order, each with all its tables: for tests, verification and reports."""
    table = open_table(ledger_path(root))
    if table is None:
        return []
    rows = _rows(table, _EPOCHS)
    epochs: list[Epoch] = []
    tables: dict[str, TableVersion] = {}
    for row in rows:
        tables = {**({} if row["complete"] else tables), **tables_of(row)}
        epochs.append(epoch_of(row, dict(tables)))
    return epochs


def oldest_versions(root: str, moment: datetime, now: datetime) -> dict[str, int]:
    """Of each table the oldest version in any epoch that was the newest one at `moment` or later, both it and `now` by
    this machine's clock.

    A row from behind `now`: its clock was ahead, or ours has been set back. It counts if none comes behind it, or the
    next one counts, which ended its time as the newest. So a clock that was ahead keeps nothing longer than another,
    and one that is set back now keeps all that was the newest at `moment`, and what was written at these times before.
    """
    table = open_table(ledger_path(root))
    newest = _newest_epoch(table) if table is not None else None
    if table is None or newest is None:
        return {}
    bounds: Bounds = {**_EPOCHS, "applied_at": (moment + timedelta(microseconds=1), None)}
    later = read_rows(table, bounds, ["epoch", "applied_at"])
    first = newest.epoch + 1
    if later.num_rows:
        is_ahead = pc.greater(later["applied_at"], pa.scalar(now, _TIME))
        first = pc.min(later.filter(pc.invert(is_ahead))["epoch"]).as_py() or first
        ahead = np.sort(later.filter(is_ahead)["epoch"].to_numpy())
        before = ahead[ahead < first][::-1]
        first -= int(np.cumprod(before == first - 1 - np.arange(len(before))).sum())  # those without a gap
    # The one before the first of these was the newest at that moment; clocks of several drivers may disagree a little.
    base = newest if first > newest.epoch else _epoch_at(table, first - 1)
    versions = {name: found.version for name, found in base.tables.items()} if base is not None else {}
    since = base.epoch if base is not None else 0
    for rows in newest_first(table, "epoch", {**_EPOCHS, "epoch": (since + 1, None)}, ["tables"]):
        for chunk in rows["tables"].chunks:
            entries = pa.table({"name": chunk.keys, "version": chunk.items.field("version")})
            for row in entries.group_by("name").aggregate([("version", "min")]).to_pylist():
                versions[row["name"]] = min(row["version_min"], versions.get(row["name"], row["version_min"]))
    return versions


def first_sample(
    root: str, moment: datetime, log: tuple[str, int], newer: tuple[datetime, int] | None = None
) -> tuple[datetime, int] | None:
    """The first sample of `log` (system id, timeline) behind which nothing is that was committed before `moment`.
    `newer`: the first of those that the position file has.

    One that was taken at `moment` or later, with none before it behind it. A clock that was set back has shown some
    moments twice: then it is one from behind the last such step that concerns `moment`.
    """
    table = open_table(ledger_path(root))
    if table is None:
        return None
    # In microseconds of the epoch: a moment of long ago may lie behind millions of samples.
    wanted, found = _microseconds(moment), None
    if newer is not None and (found := (_microseconds(newer[0]), newer[1]))[0] < wanted:
        return None
    for times, positions in _samples(table, log, newer[1] if newer is not None else None):
        one_newer = np.concatenate([[_NEVER if found is None else found[0]], times[:-1]])
        # Behind one of before the moment nothing counts, nor behind one that shows that the clock was set back.
        ends = np.flatnonzero((times < wanted) | (one_newer < times))
        count = int(ends[0]) if len(ends) else len(times)
        found = (int(times[count - 1]), int(positions[count - 1])) if count else found
        if len(ends):
            break
    return None if found is None else (_moment(found[0]), found[1])


def last_sample(root: str, position: Position) -> tuple[datetime, int] | None:
    """The newest sample of the log of `position` that lies at or below it: up to its time everything is in there."""
    table = open_table(ledger_path(root))
    if table is None:
        return None
    for times, positions in _samples(table, (position.system_id, position.timeline), position.lsn):
        return _moment(int(times[0])), int(positions[0])
    return None


def _samples(table: SmallTable, log: tuple[str, int], most: int | None) -> Iterator[tuple[Int64, Int64]]:
    """The samples of `log` at or below `most` in parts, newest first: their times, and their positions."""
    of_log = {"system_id": (log[0], log[0]), "timeline": (log[1], log[1]), "sample_lsn": (None, most)}
    wanted = {**_EPOCHS, **of_log, "sample_time": (None, None)}
    for rows in newest_first(table, "epoch", wanted, ["sample_time", "sample_lsn"]):
        yield rows["sample_time"].cast(pa.int64()).to_numpy(), rows["sample_lsn"].to_numpy()


def _microseconds(moment: datetime) -> int:
    return (moment - _BEGINNING) // timedelta(microseconds=1)


def _moment(microseconds: int) -> datetime:
    return _BEGINNING + timedelta(microseconds=microseconds)


def generation_began(root: str, generation: int) -> datetime | None:
    """When `generation` began, by its driver's clock; None when there is no such row."""
    table = open_table(ledger_path(root))
    if table is None:
        return None
    bounds = {"kind": ("generation", "generation"), "generation": (generation, generation)}
    rows = read_rows(table, bounds, ["applied_at"])
    return rows["applied_at"][0].as_py() if rows.num_rows else None


def _newest_epoch(table: SmallTable) -> Epoch | None:
    # File statistics hold every row's epoch: no data file is read to find the newest.
    known = (json.loads(file.stats).get("maxValues", {}).get("epoch") for file in table.files if file.stats)
    newest = max((epoch for epoch in known if epoch is not None), default=None)
    return None if newest is None else _epoch_at(table, newest)


def _touched(table: SmallTable, after: int) -> set[str]:
    rows = _rows(table, {**_EPOCHS, "epoch": (after + 1, None)}, ["epoch", "tables"])
    return {name for row in rows for name, version in tables_of(row).items() if version.touched}


def _epoch_at(table: SmallTable, epoch: int) -> Epoch | None:
    """Of the rows below it those are read back to one that carries all tables: often it is one itself."""
    newest: dict[str, Any] | None = None
    tables: dict[str, TableVersion] = {}
    for rows in newest_first(table, "epoch", {**_EPOCHS, "epoch": (epoch - COMPLETE_EVERY + 1, epoch)}):
        for row in rows.to_pylist(maps_as_pydicts="strict"):
            newest = newest or row
            if newest["epoch"] != epoch:
                return None
            tables = {**tables_of(row), **tables}
            if row["complete"]:
                return epoch_of(newest, tables)
    return None if newest is None else epoch_of(newest, tables)


def _rows(table: SmallTable, bounds: Bounds, columns: Sequence[str] | None = None) -> list[dict[str, Any]]:
    """Of epochs, in their order."""
    rows: list[dict[str, Any]] = read_rows(table, bounds, columns).to_pylist(maps_as_pydicts="strict")
    return sorted(rows, key=lambda row: int(row["epoch"]))


def tables_of(row: dict[str, Any]) -> dict[str, TableVersion]:
    return {name: TableVersion(**value) for name, value in (row["tables"] or {}).items()}


def epoch_of(row: dict[str, Any], tables: Mapping[str, TableVersion]) -> Epoch:
    return Epoch(
        epoch=row["epoch"],
        generation=row["generation"],
        position=Position(row["system_id"], row["timeline"], row["to_lsn"]),
        from_lsn=row["from_lsn"],
        source_time=row["source_time"],
        sample=(row["sample_time"], row["sample_lsn"]) if row["sample_time"] is not None else None,
        applied_at=row["applied_at"],
        tables=dict(tables),
    )


def _row(
    kind: str,
    epoch: int | None,
    generation: int,
    position: Position,
    tables: dict[str, TableVersion],
    *,
    complete: bool,
    from_lsn: int | None = None,
    source_time: datetime | None = None,
    sample: tuple[datetime, int] | None = None,
    stages: Mapping[str, float] | None = None,
    lag: float | None = None,
) -> dict[str, Any]:
    return {
        "kind": kind,
        "epoch": epoch,
        "generation": generation,
        "timeline": position.timeline,
        "system_id": position.system_id,
        "from_lsn": from_lsn,
        "to_lsn": position.lsn,
        "source_time": source_time,
        "sample_time": sample[0] if sample else None,
        "sample_lsn": sample[1] if sample else None,
        "applied_at": datetime.now(UTC),
        "complete": complete,
        "tables": {name: _table_json(version) for name, version in tables.items()},
        "stages": dict(stages or {}),
        "lag_seconds": lag,
    }


def _table_json(version: TableVersion) -> dict[str, Any]:
    return {name: getattr(version, name) for name in _TABLE_FIELDS}


_TABLE_FIELDS = [_TABLE.field(index).name for index in range(_TABLE.num_fields)]
