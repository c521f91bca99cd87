"""Where each table and each history stands: a version of the lake's table and the position that is applied in it.

This is what its lane knows, which may run ahead of the ledger; what the next row says is
`headwater.replicate.tables.next_row`'s.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from headwater.lake.cuts import history_name
from headwater.lake.ledger import TableVersion


class TableVersions(dict[str, TableVersion]):
    """By name in ledger rows. Each is written by one thread at a time: its lane's, or the main one without lanes."""

    def of(self, table: str) -> dict[str, TableVersion]:
        """Of the table and its history, as far as they were read."""
        return {name: self[name] for name in (table, history_name(table)) if name in self}

    def moved_since(self, table: str, before: Mapping[str, TableVersion]) -> dict[str, TableVersion]:
        """Those of the two that stand at another version than before."""
        now = self.of(table)
        return {name: v for name, v in now.items() if name not in before or v.version != before[name].version}

    def moved_to(self, name: str, version: int) -> None:
        """Another version with the same rows of the log."""
        self[name] = replace(self[name], version=version)
