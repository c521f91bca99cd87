"""Rows that the source has counted and the log has not brought: further candidates of `reload --changed`.

The server's statistics count what was inserted, updated and deleted. Of a table that the lake has applied nothing of
since it was looked at last, a higher count tells that changes went past the log: its publication left them out for a
while, say, and does no more. The counts prove nothing: they have rolled-back rows in them, come up to a minute late,
and begin anew after a crash. So they add candidates, which are compared, and excuse none (decision 0036).
"""

from __future__ import annotations

import time
from collections.abc import Collection, Iterable
from typing import Final

from headwater.lake.ledger import read_epoch
from headwater.lake.reader import LakeReader
from headwater.lake.registry import Registry, TableRecord, now_text
from headwater.load.driver_answers import is_running
from headwater.pipeline_file.pipeline import Pipeline
from headwater.source.connection import Connection, errors_named
from headwater.source.samples import emit_marker
from headwater.verify.counts_file import Counted, read_counts, write_counts

_COVERED_SECONDS: Final = 15.0
_LOOK_SECONDS: Final = 0.2


class SourceCounts:
    """What is counted now, beside what was noted. A table with a row filter has none: rows outside of it count, too."""

    def __init__(self, connection: Connection, pipeline: Pipeline, registry: Registry) -> None:
        self._connection, self._pipeline, self._root = connection, pipeline, pipeline.lake_path()
        self._records = {name: r for name, r in registry.tables.items() if r.schemas and not r.schema.row_filter}
        self._before = read_counts(self._root)
        # In this order: what is applied in between makes the note worth less, and no reason of itself.
        self._applied = self._applied_now()
        self._now = {name: changed_rows(connection, record) for name, record in self._records.items()}
        self._undecided: set[str] = set()

    def reasons(self, names: Iterable[str]) -> dict[str, str]:
        """Those of the tables that may differ by their counts, each with why. While a driver runs, it is waited until
        the lake holds what was counted; else nothing is known of them yet, and what was noted stays."""
        found = {name: reason for name in names if (reason := self._reason(name))}
        if not found:
            return {}
        self._undecided = set(found) - self._covered(found)
        self._applied = self._applied_now()
        return {name: reason for name, reason in found.items() if name not in self._undecided and self._reason(name)}

    def note(self, untouched: Collection[str], compared: Collection[str]) -> None:
        """`untouched`: tables that were no candidates; `compared`: those that were, and were found equal or made so."""
        now = self._applied_now()
        applied = {name: lsn for name, lsn in self._applied.items() if name in untouched}
        applied |= {name: lsn for name, lsn in now.items() if name in compared}
        kept = {name: known for name, known in self._before.items() if name in self._records}
        new = {
            name: Counted(self._records[name].incarnation, lsn, self._now[name], now_text())
            for name, lsn in applied.items()
            if name in self._now and name not in self._undecided
        }
        if {**kept, **new} != self._before:
            write_counts(self._root, {**kept, **new})

    def _reason(self, name: str) -> str:
        known, now = self._before.get(name), self._now.get(name)
        if known is None or now is None or known.incarnation != self._records[name].incarnation:
            return ""
        if self._applied.get(name) != known.applied_lsn:
            return ""
        more = sum(max(0, rows - known.rows.get(relation, rows)) for relation, rows in now.items())
        return (
            f"the source has counted {more} changed rows since {known.at}, and the log has brought none" if more else ""
        )

    def _covered(self, names: Iterable[str]) -> set[str]:
        """Those that the lake holds all of what was committed before this call."""
        lake, wanted = LakeReader(self._root, self._pipeline.name), set(names)
        if not is_running(self._connection, self._pipeline):
            return set()
        marker, deadline = emit_marker(self._connection), time.monotonic() + _COVERED_SECONDS
        while True:
            look = lake.look()
            covered = {name for name in wanted if look.covered(name) >= marker}
            if covered == wanted or time.monotonic() > deadline:
                return covered
            time.sleep(_LOOK_SECONDS)

    def _applied_now(self) -> dict[str, int]:
        epoch = read_epoch(self._root)
        return {name: table.applied_lsn for name, table in epoch.tables.items()} if epoch is not None else {}


def changed_rows(connection: Connection, record: TableRecord) -> dict[int, int]:
    """Rows that the server has counted as inserted, updated and deleted, by relation id of the leaves; of insert-only
    tables those inserted."""
    counted = "n_tup_ins" if record.schema.insert_only else "n_tup_ins + n_tup_upd + n_tup_del"
    with errors_named("source"):
        rows = connection.execute(
            f"select relid::bigint, {counted} from pg_catalog.pg_stat_all_tables where relid = any(%s)",
            [[leaf.relation_id for leaf in record.schema.leaves]],
        ).fetchall()
    return {int(relation): int(number) for relation, number in rows}
