"""What this driver keeps for loads and reloads: whose changes, under which names.

A table that is being loaded is held back: its changes are kept and not applied, until the load has committed and all of
them are in. One of which a part is being reloaded goes on, and the changes of the part are kept as well.
`begin`, `keep` and `end` of a table happen in its lane, or before there are lanes.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass

import numpy as np

from headwater.log.blocks import Transactions
from headwater.replicate.batches.batch import Share
from headwater.replicate.tables.kept_changes import KeptChanges


@dataclass(frozen=True, slots=True)
class _Keep:
    """`leaves`: relation ids whose changes are kept; empty: all of the table."""

    changes: KeptChanges
    leaves: frozenset[int]
    holds_back: bool


class Keeper:
    def __init__(self, root: str, generation: int) -> None:
        self._root, self._generation = root, generation
        self._by_table: dict[str, dict[str, _Keep]] = {}

    def begin(self, name: str, table: str, leaves: Iterable[int] = (), *, holds_back: bool = False) -> None:
        """From the next share on."""
        changes = KeptChanges(self._root, name, self._generation)
        changes.begin()
        # Replaced and never changed: the main thread looks at what the lanes do.
        self._by_table[table] = {
            **self._by_table.get(table, {}),
            name: _Keep(changes, frozenset(leaves), holds_back),
        }

    def end(self, name: str, table: str) -> None:
        """Nothing more; what was kept goes."""
        kept = dict(self._by_table.get(table, {}))
        keep = kept.pop(name, None)
        self._by_table[table] = kept
        (keep.changes if keep is not None else KeptChanges(self._root, name, self._generation)).remove_all()

    def names(self, table: str) -> set[str]:
        return set(self._by_table.get(table, ()))

    def all_names(self) -> set[str]:
        return {name for kept in self._by_table.values() for name in kept}

    def keeps(self, table: str) -> bool:
        return bool(self._by_table.get(table))

    def holds_back(self, table: str) -> bool:
        return any(keep.holds_back for keep in self._by_table.get(table, {}).values())

    def changes(self, name: str, table: str) -> KeptChanges:
        return self._by_table[table][name].changes

    def keep(self, table: str, share: Share, transactions: Transactions, unread: Collection[int] = ()) -> None:
        """`unread`: partitions that are kept by name alone. OSError when the lake does not take it."""
        for keep in self._by_table.get(table, {}).values():
            wanted = keep.leaves
            some = share if wanted or not unread else share.without(unread)
            blocks = [block for block in some.blocks if not wanted or block.relation.relation_id in wanted]
            truncates = [t for t in some.truncates if not wanted or wanted.intersection(t.relation_ids)]
            everything = [(block, np.ones(block.changes, dtype=np.bool_)) for block in blocks]
            keep.changes.append(everything, truncates, transactions, int(transactions.end_lsn[-1]))
