"""One table of a validation: which of its rows each expectation is asked of, and what came of it.

In full, every expectation is asked of every living row. Incrementally, an expectation that a row meets or not by
itself, and that every row met when the table was validated last, is asked only of rows that came since: what it says of
the whole is the same. All others are asked of every row: uniqueness, order, counts and other numbers of the whole,
those that allow a share of exceptions, and those that failed, or were not there, the last time.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from pyspark import StorageLevel
from pyspark.sql import DataFrame, SparkSession

from headwater.delta import storage
from headwater.delta.spark_rows import rows_of_table
from headwater.delta.tables import quoted, struct_type
from headwater.lake.registry import TableRecord
from headwater.lake.validations import Earlier, SuiteResult, TableResult, earlier
from headwater.position import Position
from headwater.schema import DELETED
from headwater.spark.session import suit
from headwater.validate.changed_rows import changed_rows
from headwater.validate.expectations import ExpectationOutcome, is_row_wise, run
from headwater.validate.suites import SEVERITIES, Expectation, Suite, basics, can_be_named


class TableValidation:
    """The validation of the table of `record` at the version that `entry`, of a cut, names; `frame` has its rows.

    `note`: behind `run`, what there is to say about how it was done.
    """

    def __init__(
        self,
        root: str,
        record: TableRecord,
        entry: Mapping[str, Any],
        frame: DataFrame,
        suite: Suite | None,
        labels: Mapping[str, Sequence[str]],
    ) -> None:
        self._root, self._record, self._entry = root, record, entry
        # The cut may be older than the newest columns, or types.
        self._schema = record.schema_in(dict(frame.dtypes)).without_marks()
        self._frame = self._living(frame)
        self._suites = [self._basics(labels), *([suite] if suite is not None else [])]
        self.note = ""

    def run(self, position: Position, *, incremental: bool) -> tuple[TableResult, list[ExpectationOutcome]]:
        suit(self._frame.sparkSession, self._frame)
        base = self._base(position) if incremental else None
        outcomes: list[ExpectationOutcome] | None = None
        if base is not None:
            try:
                outcomes = self._since(base)
            except FileNotFoundError:
                self.note = f"in full: the version of epoch {base.epoch} is not kept any more"
                base = None
        if outcomes is None:
            # Read once: every expectation that does not hold reads it again.
            self._frame.persist(StorageLevel.MEMORY_AND_DISK)
        try:
            rows = self._frame.count()
            outcomes = outcomes if outcomes is not None else self._ask(self._frame, lambda expectation: True)
        finally:
            if base is None:
                self._frame.unpersist()
        result = TableResult(
            self._record.name,
            self._record.incarnation,
            self._entry["version"],
            rows,
            [self._result(suite, outcomes) for suite in self._suites],
            base.epoch if base is not None else None,
        )
        return result, outcomes

    def _living(self, rows: DataFrame) -> DataFrame:
        """The source's columns of the rows that the source has not deleted."""
        living = rows.where(f"NOT {DELETED}") if self._record.schema.soft_delete else rows
        return living.selectExpr(*(quoted(column.name) for column in self._schema.columns))

    def _basics(self, labels: Mapping[str, Sequence[str]]) -> Suite:
        fields = struct_type(self._schema).fields
        before = earlier(self._root, self._record.name, passed_only=True)
        return basics(
            self._schema,
            classes={field.name: type(field.dataType).__name__ for field in fields},
            rows_before=before.rows if before is not None else None,
            labels=labels,
        )

    def _base(self, position: Position) -> Earlier | None:
        """The validation to go on from; None: there is none, and `note` says why."""
        found = earlier(self._root, self._record.name)
        if found is None:
            self.note = "in full: it is the first validation"
        elif found.incarnation != self._record.incarnation:
            self.note = "in full: the table was loaded again since"
        elif not found.position.same_log(position) or found.version > self._entry["version"]:
            self.note = f"in full: epoch {found.epoch}, the newest that was validated, is not before this cut"
        else:
            return found
        return None

    def _since(self, base: Earlier) -> list[ExpectationOutcome]:
        """The outcomes, where only what came since `base` is new."""

        def settled(expectation: Expectation) -> bool:
            return is_row_wise(expectation) and expectation.fingerprint in base.passed

        folder = storage.path_of(self._entry["path"])
        with changed_rows(self._root, folder, base.version, self._entry["version"]) as changed:
            spark = self._frame.sparkSession
            rows = self._changed(spark, changed.folder)
            new = self._ask(rows, settled)
            self.note = f"{changed.files} of {changed.of} files hold what came since epoch {base.epoch}"
        rest = self._ask(self._frame, lambda expectation: not settled(expectation))
        # A suite may have the same one twice, with two severities.
        found = {(o.suite, o.expectation.fingerprint, o.expectation.severity): o for o in [*new, *rest]}
        return [found[suite.name, e.fingerprint, e.severity] for suite in self._suites for e in suite.expectations]

    def _changed(self, spark: SparkSession, folder: str | None) -> DataFrame:
        if folder is None:
            return self._frame.limit(0)
        return self._living(rows_of_table(spark, folder))

    def _ask(self, rows: DataFrame, of: Callable[[Expectation], bool]) -> list[ExpectationOutcome]:
        suites = [Suite(s.name, tuple(e for e in s.expectations if of(e)), s.where) for s in self._suites]
        return run(rows, self._record.name, suites, self._key)

    @property
    def columns_left_out(self) -> list[str]:
        """Those that no expectation can name."""
        return [column.name for column in self._schema.columns if not can_be_named(column.name)]

    @property
    def _key(self) -> list[str]:
        key = list(self._schema.key)
        return key if all(can_be_named(name) for name in key) else []

    def _result(self, suite: Suite, outcomes: Sequence[ExpectationOutcome]) -> SuiteResult:
        mine = [outcome for outcome in outcomes if outcome.suite == suite.name]
        failed = [outcome for outcome in mine if not outcome.success]
        severities = [outcome.expectation.severity for outcome in failed]
        return SuiteResult(
            suite.name,
            expectations=len(mine),
            failed=severities.count("error"),
            warnings=len(failed) - severities.count("error"),
            severity=max(severities, key=SEVERITIES.index, default=None),
            failures=[{**outcome.to_json(), "keys": list(outcome.keys)} for outcome in failed],
            passed=[o.expectation.fingerprint for o in mine if o.success],
        )


__all__ = ["TableValidation"]
