"""What was validated and how it came out: `<root>/_headwater/validations`, a row per validation, table and suite.

Only ever appended, one commit per validation, by whoever validates: a lost race is tried again, since no row speaks of
another. Waits read it by a `ValidationReader`, which asks anew only when the table's version has moved, and only for
what may still be handed on: validations whose cut is kept, and the newest one.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from operator import itemgetter
from typing import Any

import pyarrow as pa

from headwater.delta import storage
from headwater.delta.small_tables import (
    Bounds,
    LostRace,
    SmallTable,
    append_once,
    create_table,
    make_durable,
    newest_first,
    open_table,
    read_rows,
)
from headwater.lake.paths import validations_path
from headwater.lake.validated import Checked, ValidatedEpoch
from headwater.position import Position

_TIME = pa.timestamp("us", "UTC")
_SCHEMA = pa.schema(
    [
        ("validation", pa.string()),
        ("pipeline", pa.string()),
        ("epoch", pa.int64()),
        ("system_id", pa.string()),
        ("timeline", pa.int64()),
        ("lsn", pa.int64()),
        ("sample_time", _TIME),
        ("sample_lsn", pa.int64()),
        ("table", pa.string()),
        ("incarnation", pa.int64()),
        ("version", pa.int64()),
        ("rows", pa.int64()),
        ("suite", pa.string()),
        ("success", pa.bool_()),
        ("severity", pa.string()),
        ("expectations", pa.int64()),
        ("failed", pa.int64()),
        ("warnings", pa.int64()),
        ("failures", pa.string()),
        ("passed", pa.string()),
        ("mode", pa.string()),
        ("base_epoch", pa.int64()),
        ("started_at", _TIME),
        ("finished_at", _TIME),
        ("kept_until", _TIME),
        ("gx_version", pa.string()),
    ]
)
_POLLED = (
    *("validation", "epoch", "system_id", "timeline", "lsn", "sample_time", "sample_lsn"),
    *("table", "incarnation", "suite", "success", "finished_at", "failures"),
)
_EARLIER = (
    *("validation", "system_id", "timeline", "lsn", "incarnation", "version", "rows"),
    *("success", "passed", "finished_at"),
)
_SHOWN = ("suite", "success", "mode", "finished_at", "rows", "expectations", "failures")


@dataclass(frozen=True, slots=True)
class SuiteResult:
    """How one suite came out on one table. `severity`: the highest among what failed, None where nothing did; `failed`
    counts those of severity error, `warnings` the others. `passed`: fingerprints of what holds for every row."""

    suite: str
    expectations: int
    failed: int
    warnings: int
    severity: str | None
    failures: Sequence[Mapping[str, Any]] = ()
    passed: Sequence[str] = ()

    @property
    def success(self) -> bool:
        return self.failed == 0


@dataclass(frozen=True, slots=True)
class TableResult:
    """One table of a validation. `rows`: all of its living rows. `base_epoch`: of the validation from which on only
    changed rows were looked at; None: all were."""

    table: str
    incarnation: int
    version: int
    rows: int
    suites: Sequence[SuiteResult]
    base_epoch: int | None = None

    @property
    def success(self) -> bool:
        return all(suite.success for suite in self.suites)


@dataclass(frozen=True, slots=True)
class Validation:
    """One run. `position`: that of the cut; `sample`: the source's clock and its log position, the newest one known at
    or below it. `kept_until`: when the pin of the tables that passed ends."""

    id: str
    pipeline: str
    epoch: int
    position: Position
    sample: tuple[datetime, int] | None
    tables: Sequence[TableResult]
    started_at: datetime
    finished_at: datetime
    kept_until: datetime
    gx_version: str


@dataclass(frozen=True, slots=True)
class Earlier:
    """What is known of a table from its newest validation: the ground that an incremental one stands on."""

    epoch: int
    position: Position
    incarnation: int
    version: int
    rows: int
    passed: frozenset[str] = field(default=frozenset())


def record(root: str, validation: Validation) -> None:
    """Append the rows of `validation`, all in one commit, which survives a power cut: who waited for it goes on. Not
    before its epoch is on disk: a power cut would give the number, and those of the versions, to others that nobody has
    validated."""
    storage.sync(root)
    table = create_table(validations_path(root), _SCHEMA)
    rows = [_row(validation, found, suite) for found in validation.tables for suite in found.suites]
    while True:
        try:
            append_once(table, rows, _SCHEMA)
            break
        except LostRace:
            table.look()
    make_durable(table)


def earlier(root: str, name: str, *, passed_only: bool = False) -> Earlier | None:
    """The validation of table `name` at the newest epoch, and of several there the last; with `passed_only` of those
    that it passed."""
    for rows in _of_table(root, name, _EARLIER):
        by_run: dict[str, list[dict[str, Any]]] = {}
        for row in rows:
            by_run.setdefault(row["validation"], []).append(row)
        runs = [run for run in by_run.values() if not passed_only or all(row["success"] for row in run)]
        if runs:
            newest = max(runs, key=lambda run: (run[0]["epoch"], run[0]["finished_at"]))
            first = newest[0]
            return Earlier(
                first["epoch"],
                _position(first),
                first["incarnation"],
                first["version"],
                first["rows"],
                frozenset(fingerprint for row in newest for fingerprint in json.loads(row["passed"])),
            )
    return None


def recent_results(root: str, table: str, most: int = 20) -> list[dict[str, Any]]:
    """The outcomes of `table` at the newest epochs, newest first, a suite each. What failed is told by its name and
    severity, without the keys of its rows."""
    rows: list[dict[str, Any]] = []
    for more in _of_table(root, table, _SHOWN):
        rows += more
        if len(rows) >= most:
            break
    rows = sorted(sorted(rows, key=itemgetter("suite")), key=itemgetter("finished_at"), reverse=True)
    return [
        {
            "epoch": row["epoch"],
            "suite": row["suite"],
            "success": row["success"],
            "mode": row["mode"],
            "finished_at": row["finished_at"].isoformat(timespec="seconds").replace("+00:00", "Z"),
            "rows": row["rows"],
            "expectations": row["expectations"],
            "failed": [
                {"expectation": failure["expectation"], "columns": failure["columns"], "severity": failure["severity"]}
                for failure in json.loads(row["failures"])
            ],
        }
        for row in rows[:most]
    ]


def _of_table(root: str, name: str, columns: Sequence[str]) -> Iterator[list[dict[str, Any]]]:
    """The rows of a table in parts, those of the newest epochs first: rows are kept for good, so no more are read than
    are asked for."""
    table = open_table(validations_path(root))
    for rows in newest_first(table, "epoch", {"table": (name, name)}, columns) if table is not None else ():
        yield rows.to_pylist()


class ValidationReader:
    """The validations of the lake under `root`, as a wait sees them. Not thread-safe."""

    def __init__(self, root: str) -> None:
        self._path = validations_path(root)
        self._table: SmallTable | None = None
        self._is_read = False  # as far as the table was looked at
        self._found: list[ValidatedEpoch] = []

    def look(self) -> list[ValidatedEpoch]:
        """What was validated, the newest epoch first."""
        if self._table is None:
            self._table = open_table(self._path)
        elif self._table.look():
            self._is_read = False
        if self._table is not None and not self._is_read:
            newest = next((rows["epoch"][0].as_py() for rows in newest_first(self._table, "epoch", {}, [])), 0)
            wanted: tuple[Bounds, ...] = (
                {"kept_until": (datetime.now(UTC), None)},
                {"epoch": (newest, newest)},  # or, of which some are among the first
            )
            rows = [row for bounds in wanted for row in read_rows(self._table, bounds, _POLLED).to_pylist()]
            self._found = _epochs({(row["validation"], row["table"], row["suite"]): row for row in rows}.values())
            self._is_read = True
        return self._found


def _epochs(rows: Iterable[Mapping[str, Any]]) -> list[ValidatedEpoch]:
    """Per epoch and table the newest validation counts; all of its suites must have passed."""
    runs: dict[tuple[int, str], dict[str, list[Mapping[str, Any]]]] = {}
    for row in rows:
        runs.setdefault((row["epoch"], row["table"]), {}).setdefault(row["validation"], []).append(row)
    tables: dict[int, dict[str, Checked]] = {}
    for (epoch, name), found in runs.items():
        newest = max(found.values(), key=lambda suites: suites[0]["finished_at"])
        first = newest[0]
        failures = [failure for row in newest if not row["success"] for failure in json.loads(row["failures"])]
        tables.setdefault(epoch, {})[name] = Checked(
            all(row["success"] for row in newest),
            first["incarnation"],
            _position(first),
            (first["sample_time"], first["sample_lsn"]) if first["sample_time"] is not None else None,
            tuple(failure["expectation"] for failure in failures if failure["severity"] == "error"),
        )
    return [ValidatedEpoch(epoch, tables[epoch]) for epoch in sorted(tables, reverse=True)]


def _position(row: Mapping[str, Any]) -> Position:
    return Position(row["system_id"], row["timeline"], row["lsn"])


def _row(validation: Validation, found: TableResult, suite: SuiteResult) -> dict[str, Any]:
    sample = validation.sample
    return {
        "validation": validation.id,
        "pipeline": validation.pipeline,
        "epoch": validation.epoch,
        "system_id": validation.position.system_id,
        "timeline": validation.position.timeline,
        "lsn": validation.position.lsn,
        "sample_time": sample[0] if sample is not None else None,
        "sample_lsn": sample[1] if sample is not None else None,
        "table": found.table,
        "incarnation": found.incarnation,
        "version": found.version,
        "rows": found.rows,
        "suite": suite.suite,
        "success": suite.success,
        "severity": suite.severity,
        "expectations": suite.expectations,
        "failed": suite.failed,
        "warnings": suite.warnings,
        "failures": json.dumps(list(suite.failures)),
        "passed": json.dumps(list(suite.passed)),
        "mode": "full" if found.base_epoch is None else "incremental",
        "base_epoch": found.base_epoch,
        "started_at": validation.started_at,
        "finished_at": validation.finished_at,
        "kept_until": validation.kept_until,  # also of what failed: it goes over an earlier success of its epoch
        "gx_version": validation.gx_version,
    }
