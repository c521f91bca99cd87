"""What this driver keeps in the lake for loads and reloads, until it has merged it: whose changes, under which names.

A table that is being loaded is held back: its changes are kept and not applied, until the load has committed and all of
them are in. One of which a part is being reloaded goes on, and the changes of the part are kept as well.

In the lake, so that the slot may move on, and whatever becomes of the driver. A share is kept before it is committed to
the table, and so before the epoch that it belongs to is published: what either position covers is all there. If a
driver died in between, the next one keeps it again under its own generation; who reads goes by positions, so nothing
counts twice.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from os.path import join
from typing import Final

import numpy as np

from headwater.delta import storage
from headwater.lake.paths import kept_path
from headwater.lake_root import is_remote
from headwater.log.blocks import Block, Rows, Transactions, Truncate
from headwater.log.kept import KeptShare, is_whole, pieces, share_of
from headwater.replicate.batches.batch import Share

_SUFFIX: Final = ".kept"


@dataclass(frozen=True, slots=True)
class ShareInFiles:
    """A share that was kept. `counts`: which of its transactions no earlier share holds; `files`: where it lies."""

    share: KeptShare
    counts: Rows
    files: tuple[str, ...]


@dataclass(slots=True)
class Seen:
    """How far what is kept was read: the `last` share, the `base` of the next one's numbers, the position `reached`."""

    last: str = ""
    base: int = 0
    reached: int = 0


class KeptChanges:
    """What is kept under `name`, by the driver of `generation` from now on. One thread at a time, but for `shares`."""

    def __init__(self, root: str, name: str, generation: int) -> None:
        self._folder = kept_path(root, name)
        self._generation = generation
        self._number = 0

    def begin(self) -> None:
        storage.make_folder(self._folder, mode=0o700)
        # A driver that was given the same generation twice does not exist, but its files may be those of a retry.
        mine = [int(name.split("-")[1]) for name in self._names() if int(name.split("-")[0]) == self._generation]
        self._number = max(mine, default=0)

    def append(
        self,
        blocks: Sequence[tuple[Block, Rows]],
        truncates: Sequence[Truncate],
        transactions: Transactions,
        to_lsn: int,
    ) -> None:
        """Keep what the masks leave of `blocks`; nothing, if that is nothing."""
        if not truncates and not any(mask.any() for _, mask in blocks):
            return
        self._number += 1
        for number, piece in enumerate(pieces(blocks, truncates, transactions, to_lsn)):
            file = join(self._folder, f"{self._generation:012d}-{self._number:09d}-{number:06d}{_SUFFIX}")
            storage.replace(file, piece)
            storage.sync_files(file)  # before its row is published: a row that outlives a power cut holds it for kept

    def shares(
        self, up_to: int | None = None, seen: Seen | None = None, applied: int | None = None
    ) -> Iterator[ShareInFiles]:
        """All that is kept, in the log's order. What a driver had begun to keep when it died is left out.

        `up_to`: so far counts what earlier drivers have kept. What lies above it the log delivers again, and it is kept
        again when its turn has come. `seen`: goes on from there, and is moved on, but not past what lies above `up_to`:
        who kept that may yet bring it into the table. `applied`: beside the lane, which may be keeping more: only as
        far as the table holds it.
        """
        seen, moves = seen or Seen(), True
        for kept_as, names in groupby(self._names(), key=lambda name: name.rsplit("-", 1)[0]):
            if kept_as <= seen.last:
                continue
            is_own = int(kept_as.split("-")[0]) == self._generation
            files = tuple(join(self._folder, name) for name in names)
            readers = [partial(storage.read_range, file) for file in files]
            # A store has an object as it was written, or has none.
            if not is_remote(self._folder) and not all(map(is_whole, readers, [storage.info(f).size for f in files])):
                continue  # the power went while it was written
            share = share_of(readers, seen.base)
            if is_own and applied is not None and (share is None or share.to_lsn > applied):
                return
            if share is None:
                continue
            to_lsn, ends = share.to_lsn, share.transactions.end_lsn
            if up_to is not None and not is_own and to_lsn > up_to:
                to_lsn, moves = up_to, False
            counts: Rows = np.asarray((ends > seen.reached) & (ends <= to_lsn))
            seen.base, seen.reached = share.next, max(seen.reached, to_lsn)
            seen.last = kept_as if moves else seen.last
            yield ShareInFiles(share, counts, files)

    def remove(self, kept: ShareInFiles) -> None:
        """It is in the table."""
        for file in kept.files:
            storage.delete(file)

    def remove_all(self) -> None:
        """But for what a successor has kept already, while this driver did not know of it."""
        if not any(int(name.split("-")[0]) > self._generation for name in self._names()):
            storage.delete_folder(self._folder)

    def _names(self) -> list[str]:
        return sorted(name for name in storage.names(self._folder) if name.endswith(_SUFFIX))


@dataclass(frozen=True, slots=True)
class _Keep:
    """`leaves`: relation ids whose changes are kept; empty: all of the table."""

    changes: KeptChanges
    leaves: frozenset[int]
    holds_back: bool


class Keeper:
    """`begin`, `keep` and `end` of a table happen in its lane, or before there are lanes."""

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
