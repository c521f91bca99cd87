"""The new content of a table, or of a part of it, made ready beside the table's writer: files that no commit names yet,
with an index of their keys, brought forward by what was committed since their rows were read. The writer's turn brings
the last few changes, and names all of it in one commit, however large it is.

Memory alone knows it: whoever comes behind a driver that died makes it ready again, from the same files.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyroaring import BitMap

from headwater.apply.find_rows import Work
from headwater.apply.live_files import are_among, deleted_rows
from headwater.apply.live_table import Aside, Base, LiveTable
from headwater.apply.waiting_files import WaitingFiles
from headwater.arrow_types import key_schema, lake_schema
from headwater.delta import storage
from headwater.delta.deletion_vectors import vector_file
from headwater.delta.delta_log import DataFile
from headwater.delta.index.codes import Codes, encode
from headwater.delta.index.index import NOWHERE, file_of, row_of
from headwater.delta.layout import layout_of
from headwater.delta.metadata import becoming
from headwater.delta.new_files import discard, discard_vectors
from headwater.delta.where_files import columns_read, matches, rows_matching
from headwater.errors import Diverged, Refused
from headwater.names import TableName
from headwater.net_changes import NetChanges, Parts
from headwater.predicate import Predicate, columns_of
from headwater.schema import TableSchema

Int64 = npt.NDArray[np.int64]


def reload_counter(app_id: str, name: str) -> str:
    """The appId that the commit of the reload `name` counts: to name its files twice would damage the table."""
    return f"{app_id}/reload/{name}"


class MadeReady:
    """`emptied`: the stored rows whose place it takes; None: all there are. `schema`: of its rows; with `becomes` the
    table has these columns and no others afterwards. `still_wanted` raises when it is not. One thread at a time."""

    def __init__(
        self,
        base: Base,
        schema: TableSchema,
        waiting: WaitingFiles,
        emptied: Predicate | None,
        still_wanted: Callable[[], None],
        *,
        becomes: bool,
    ) -> None:
        """Refused when a file is gone."""
        self.schema, self.emptied = schema, emptied
        self._base, self._waiting, self._still_wanted = base, waiting, still_wanted
        metadata = becoming(base.snapshot, schema) if becomes else base.snapshot.metadata
        files = {file.name: file for file in waiting.files}
        snapshot = replace(base.snapshot, metadata=metadata, files=files, transactions={})
        self._refuse_gone()
        self.rows = LiveTable(waiting.folder, schema, aside=Aside(snapshot, base.room, still_wanted))
        self.rows.index_keys()
        self._emptied: dict[str, BitMap] = {}  # rows of the part by file, whether they live or not
        self._elsewhere: dict[str, BitMap] = {}
        self._made: list[DataFile] = []
        self._changes = 0
        self._doubles: list[Codes] = []
        self._left: list[Codes] = []  # keys that changes have taken out of the part, by and by
        self.moved_out: tuple[Codes, Int64] = Codes(np.zeros(0, dtype=np.uint64)), np.zeros(0, dtype=np.int64)
        """Behind `link`: keys that have left the part for another place in the table, and that place."""
        if emptied is not None:
            self._find_emptied(emptied)
            self._find_doubles()
            self._elsewhere.clear()

    @property
    def files(self) -> list[DataFile]:
        """With vectors for the rows that changes have removed since."""
        return list(self.rows.snapshot.files.values())

    def as_changes(self, leaves: tuple[int, ...] = ()) -> NetChanges:
        """What its commit does to the table. `leaves`: the partitions whose place it takes, where it is theirs."""
        return NetChanges(
            rows=lake_schema(self.schema).empty_table(),
            stored=np.zeros(0, dtype=np.bool_),
            unchanged={},
            origins=None,
            removed=key_schema(self.schema).empty_table(),
            changes=self._changes,
            truncated=self.emptied is None,
            truncated_leaves=leaves,
            replaced=self.emptied if not leaves else None,
            staged=self,
        )

    def brought_forward(self, net: NetChanges, made: Iterable[DataFile]) -> None:
        """Its files hold `net` from now on; `made`: for that, as the log would name them."""
        self._made += made
        self._changes += net.changes
        if self.emptied is None or not self.schema.key:
            return
        if net.truncated or net.truncated_leaves:  # which names no key
            for codes in self.rows.all_keys():
                self._note_left(codes)
        for part in net.in_parts():
            for keys in (part.rows, part.removed):
                self._note_left(encode(self.schema, keys.select(list(self.schema.key))))

    def _note_left(self, codes: Codes) -> None:
        self._left.append(codes.take(np.flatnonzero(self.rows.find(codes) == NOWHERE)))

    def link(self, state: LiveTable, work: Work) -> list[DataFile]:
        """In the writer's turn: what goes of the table, as `work`; the files that come."""
        if not work.everything:
            assert self.emptied is not None
            emptied = state.rows_of(self.emptied, lake_schema(self.schema), self._emptied)
            work.empty(state, emptied)
            places = self._elsewhere_now(state, self._doubles, emptied, here=True)[1]
            work.diverged(len(places), lambda: [f"{len(places)} rows stood outside of the part as well"])
            work.delete(state, places)
            self.moved_out = self._elsewhere_now(state, self._left, emptied, here=False)
        return self.files

    def _elsewhere_now(
        self, state: LiveTable, some: list[Codes], emptied: dict[str, BitMap], *, here: bool
    ) -> tuple[Codes, Int64]:
        """Of `some` keys those under which a live row stands outside of the part, and where. `here`: those alone that
        have a row in the part as well, or those that have none."""
        codes = Codes.joined(some) if some else Codes(np.zeros(0, dtype=np.uint64))
        places = state.find(codes)
        is_here = self.rows.find(codes) != NOWHERE
        at = np.flatnonzero((places != NOWHERE) & ~state.are_among(places, emptied) & (is_here == here))
        at = at[np.unique(places[at], return_index=True)[1]]
        return codes.take(at), places[at]

    def discard_left_over(self) -> None:
        """Behind the commit: what changes have taken the place of before is nobody's."""
        folder, named = self._waiting.folder, self.rows.snapshot.files
        discard(folder, [file for file in (*self._waiting.files, *self._made) if file.name not in named])
        # One file holds the vectors that were made at a time: it stays for any that is still of use.
        needed = {vector_file(folder, file.vector) for file in named.values() if file.vector}
        made = [file for file in self._made if file.vector and vector_file(folder, file.vector) not in needed]
        discard_vectors(folder, made)

    def give_up(self) -> None:
        """It is not going to be committed: what was made for changes goes; the files that were read stay."""
        read = {file.name for file in self._waiting.files}
        discard(self._waiting.folder, [file for file in self._made if file.name not in read])
        discard_vectors(self._waiting.folder, self._made)

    def _refuse_gone(self) -> None:
        """No commit has named them: a VACUUM by hand takes them for nobody's once they are old."""
        named = [file.name for file in self._waiting.files if file.name in self._base.snapshot.files]
        assert not named, "the table has these files already"
        gone = [place for place in self._waiting.places if not self._is_there(place)]
        if gone:
            raise Refused(
                f"{len(gone)} of the {len(self._waiting.files)} files of rows that were read are gone from the lake, "
                "as by a VACUUM of another program",
                code="reload_failed",
                where=self._waiting.folder,
                remedy="run it again, and no VACUUM of another program beside it",
            )

    def _is_there(self, place: str) -> bool:
        self._still_wanted()
        return storage.exists(place)

    def _find_emptied(self, emptied: Predicate) -> None:
        """Which rows of the table's files are of the part: that never changes of a file."""
        snapshot = self._base.snapshot
        layout, read = layout_of(snapshot.metadata), columns_read(emptied, lake_schema(self.schema))
        for name, file in snapshot.files.items():
            self._still_wanted()
            self._emptied[name] = rows_matching(emptied, snapshot.folder, file, layout, read)

    def _find_doubles(self) -> None:
        """Keys under which a row stands outside of the part as well: by mistake, or until changes remove it here."""
        for codes in self.rows.all_keys():
            self._still_wanted()
            places = self._base.keys.find(codes)
            at = np.flatnonzero(places != NOWHERE)
            at = at[self._stands_elsewhere(places[at])]
            if len(at):
                self._doubles.append(codes.take(at))

    def _stands_elsewhere(self, places: Int64) -> npt.NDArray[np.bool_]:
        """Of each place, whether a live row outside of the part stood there."""
        found = np.zeros(len(places), dtype=np.bool_)
        numbers, rows = file_of(places), row_of(places)
        for number in np.unique(numbers).tolist():
            name = self._base.files.get(number)
            if name is not None:
                at = np.flatnonzero(numbers == number)
                found[at] = ~are_among(rows[at], self._not_elsewhere(name))
        return found

    def _not_elsewhere(self, name: str) -> BitMap:
        """Rows of a file that were of the part, or gone."""
        if name not in self._elsewhere:
            snapshot = self._base.snapshot
            self._elsewhere[name] = self._emptied[name] | deleted_rows(snapshot, snapshot.files[name])
        return self._elsewhere[name]


def on_rows_of(where: Predicate, net: NetChanges, schema: TableSchema) -> NetChanges:
    """The net effect `net` on the rows of `where` alone: one that is not of it (any more) is gone from them. Diverged
    where that cannot be told, since the log left out a value that it is about."""
    if net.on_disk is not None:
        return replace(net, on_disk=_PartsOnRows(where, net.on_disk, schema))
    if any(net.unchanged[name].any() for name in columns_of(where) & net.unchanged.keys()):
        table = str(TableName(schema.schema, schema.name))
        raise Diverged(
            "rows keep values that the log does not carry, and that the predicate is about",
            where=table,
            remedy=f"headwater reload PIPELINE.yaml --table {table}",
        )
    is_of = matches(where, net.rows)
    some, keys = pa.array(is_of), list(schema.key)
    removed = net.removed
    if keys:
        left = net.rows.filter(pa.array(~is_of & net.stored)).select(keys).cast(removed.schema)
        removed = pa.concat_tables([removed, left])
    return replace(
        net,
        rows=net.rows.filter(some),
        stored=net.stored[is_of],
        unchanged={name: mask[is_of] for name, mask in net.unchanged.items() if mask[is_of].any()},
        origins=net.origins.filter(some) if net.origins is not None else None,
        removed=removed,
    )


@dataclass(frozen=True, slots=True)
class _PartsOnRows:
    """`headwater.net_changes.Parts`."""

    where: Predicate
    parts: Parts
    schema: TableSchema

    def __iter__(self) -> Iterator[NetChanges]:
        for part in self.parts:
            yield on_rows_of(self.where, part, self.schema)

    def write_parquet(self, rows: pa.Table) -> str:
        return self.parts.write_parquet(rows)
