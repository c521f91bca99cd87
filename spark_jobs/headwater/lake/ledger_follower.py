"""The newest epochs of a ledger, each with all its tables, for somebody who asks again and again.

The first question reads the rows since the last one that names every table; every later one only the files that were
added since. They are read with our own reader: a query engine takes longer to plan a query than to read a row.
Without Spark. Not thread-safe.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from headwater.delta import storage
from headwater.delta.delta_log import DataFile, Snapshot, read_snapshot
from headwater.delta.small_tables import may_hold
from headwater.lake.ledger import COMPLETE_EVERY, Epoch, TableVersion, epoch_of, tables_of
from headwater.lake.paths import ledger_path

_KEPT = 16
_COLUMNS = ["epoch", "generation", "timeline", "system_id", "from_lsn", "to_lsn", "source_time", "sample_time"]
_COLUMNS += ["sample_lsn", "applied_at", "complete", "tables"]


class FollowedLedger:
    """The ledger of the lake under `root`."""

    def __init__(self, root: str) -> None:
        self._folder = ledger_path(root)
        self._snapshot: Snapshot | None = None
        self._epochs: dict[int, Epoch] = {}  # the newest ones, without a gap, oldest first

    def epoch(self, number: int) -> Epoch | None:
        """Epoch `number` with all its tables; None when it is none of the newest, which `read_epoch` may still find."""
        if number not in self._epochs:
            self._refresh(number)
        return self._epochs.get(number)

    def _refresh(self, number: int) -> None:
        snapshot, self._snapshot = self._snapshot, None  # should it fail half way, the next question begins anew
        if snapshot is None:
            try:
                snapshot = read_snapshot(self._folder)
            except FileNotFoundError:
                return  # nobody has replicated yet
            self._epochs = {}
            added: Iterable[DataFile] = snapshot.files.values()
        else:
            commits = snapshot.advance()
            names = {action["add"]["path"] for commit in commits for action in commit if "add" in action}
            added = [snapshot.files[name] for name in names if name in snapshot.files]
        after = max(self._epochs, default=number - COMPLETE_EVERY)
        rows = [
            row for file in added if may_hold(file, {"epoch": (after + 1, None)}) for row in self._read(file, after)
        ]
        if self._take(sorted(rows, key=lambda row: int(row["epoch"]))):
            self._snapshot = snapshot

    def _read(self, file: DataFile, after: int) -> list[dict[str, Any]]:
        with storage.parquet_file(file.in_folder(self._folder)) as opened:
            found = opened.read(_COLUMNS, use_threads=False)  # most files hold one row
        rows: list[dict[str, Any]] = found.to_pylist(maps_as_pydicts="strict")
        return [row for row in rows if row["epoch"] is not None and row["epoch"] > after]

    def _take(self, rows: list[dict[str, Any]]) -> bool:
        """False when a row is missing between those that are known and these, or when these follow others of the same
        numbers, which a power cut took: then nothing is known any more."""
        last = self._epochs[max(self._epochs)] if self._epochs else None
        for row in rows:
            if last is None and not row["complete"]:
                continue  # what this row does not name is not known
            if last is not None and (row["epoch"], row["from_lsn"]) != (last.epoch + 1, last.position.lsn):
                self._epochs = {}
                return False
            known: dict[str, TableVersion] = {} if row["complete"] or last is None else dict(last.tables)
            last = epoch_of(row, {**known, **tables_of(row)})
            self._epochs[last.epoch] = last
        for number in list(self._epochs)[:-_KEPT]:
            del self._epochs[number]
        return True
