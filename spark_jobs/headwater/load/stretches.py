"""A large table, copied stretch by stretch: each is read in short units, and written to files of its own by the task
that reads it. One commit at the end adds them all.

A stretch that was written is noted in the lake. An attempt that comes after (a new capture point, or a load after a
kill) takes its files if the source proves that their rows are the ones its own snapshot sees: no row version of these
pages is new since, and there are as many as before. A row version never moves, and one that has gone is missing in the
count. So a table has one capture point, however many attempts its rows come from.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from hashlib import sha256
from itertools import chain, islice

import psycopg
import pyarrow as pa
from psycopg import sql

from headwater.arrow_types import as_stored, lake_schema
from headwater.delta import storage
from headwater.delta.data_files import gathered
from headwater.delta.layout import Layout
from headwater.delta.new_files import write_rows
from headwater.lake.paths import table_path
from headwater.load.stretch_notes import StretchNote, StretchNotes
from headwater.load.units import Extent, Sessions, Unit, UnitReader, cut_units, within
from headwater.schema import Leaf, TableSchema
from headwater.source.catalog.where_sql import row_filter
from headwater.source.snapshots import CapturePoint

FEW_PARTITIONS = 8
"""A stretch whose rows lie in more of them is written without regard to partitions at first: as files of its own, what
it has of each would be too small."""
UNITS_PER_STRETCH = 8
"""Of 32 MiB each: files of some ten to a hundred MiB, and as much to be read again at most, where one row changed."""
_TOO_OLD = 1 << 30
"""Transactions after which ids are not compared any more; the server could for twice as many."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Units that follow each other in a relation; `note`: what an earlier attempt has written of just these pages."""

    units: tuple[Unit, ...]
    note: StretchNote | None = None

    @property
    def pages(self) -> Unit:
        return replace(self.units[0], end=self.units[-1].end)

    def describe(self) -> str:
        note = self.note.to_json() if self.note is not None else None
        return json.dumps({"units": [asdict(unit) for unit in self.units], "note": note})

    @classmethod
    def described(cls, text: str) -> Stretch:
        document = json.loads(text)
        note = StretchNote.from_json(document["note"]) if document["note"] is not None else None
        return cls(tuple(Unit(**unit) for unit in document["units"]), note)


def cut_stretches(leaf: Leaf, extent: Extent, notes: Iterable[StretchNote], most: int) -> list[Stretch]:
    """All pages of the leaf: those with a note as they were then, the others in stretches of at most `most` units."""
    found: list[Stretch] = []
    first: int | None = 0
    for note in sorted(notes, key=lambda note: note.first):
        if first is None or note.first < first:
            continue  # of another cut than one before it
        found += _without_note(leaf, extent, first, note.first, most)
        found.append(Stretch(tuple(cut_units(leaf, extent, note.first, note.end)), note))
        first = note.end
    return found + (_without_note(leaf, extent, first, None, most) if first is not None else [])


def _without_note(leaf: Leaf, extent: Extent, first: int, end: int | None, most: int) -> list[Stretch]:
    if first == end:
        return []
    units = cut_units(leaf, extent, first, end)
    return [Stretch(tuple(units[at : at + most])) for at in range(0, len(units), most)]


def units_together(units: int, connections: int) -> int:
    """Into stretches of how many units so many are cut, if each connection is to have its share of them."""
    return max(1, min(UNITS_PER_STRETCH, -(-units // connections)))


def like(reader: UnitReader, schema: TableSchema, layout: Layout, capture: CapturePoint) -> dict[int, str]:
    """What must be the same for rows of a leaf that were written earlier: the server and its history, the relation, and
    what is made of its rows. By relation id. `schema`, `layout`: of what is written."""
    of_all = (capture.position.system_id, capture.position.timeline, schema.with_leaves(()), layout)
    secret = sha256(reader.hash_key).hexdigest() if reader.hash_key else ""
    return {
        leaf.relation_id: sha256(
            repr((*of_all, secret, leaf, reader.signatures[leaf.relation_id])).encode()
        ).hexdigest()
        for leaf in reader.schema.leaves
    }


@dataclass(frozen=True)
class StretchWriter:
    """What a Spark task needs to copy stretches. `like`: of each leaf, see there."""

    reader: UnitReader
    notes: StretchNotes
    layout: Layout
    like: Mapping[int, str]
    xmin: int
    xmax: int
    """Of the capture point's snapshot."""

    def __call__(self, batches: Iterator[pa.RecordBatch]) -> Iterator[pa.RecordBatch]:
        """For `mapInArrow`: descriptions of stretches in, one note for each and whether it was there before out."""
        assert self.reader.writes_to is not None
        self.reader.writes_to.enter()
        with self.reader.sessions() as sessions:
            for batch in batches:
                for text in batch.column(0).to_pylist():
                    stretch = Stretch.described(text)
                    is_kept = stretch.note is not None and self._is_unchanged(sessions, stretch, stretch.note)
                    note = self._kept(sessions, stretch) if is_kept else self._written(sessions, stretch)
                    yield pa.RecordBatch.from_pydict({"note": [note.to_json()], "kept": [is_kept]})

    def _is_unchanged(self, sessions: Sessions, stretch: Stretch, note: StretchNote) -> bool:
        """Whether the snapshot sees just the rows that the note's files hold."""
        is_like = note.like == self.like[note.relation_id]
        if not is_like or self.xmin < note.xmin or self.xmax < note.xmax or self.xmax - note.xmin > _TOO_OLD:
            return False
        pages = stretch.pages
        # A row version that the snapshot sees, written by a transaction older than all that ran at the note's, was seen
        # there too, in the same place.
        statement = sql.SQL(
            "select count(*), count(*) filter (where age(xmin) > age({}::xid)) from only {} where {}"
        ).format(
            sql.Literal(str(note.xmin % (1 << 32))),
            sql.Identifier(pages.schema, pages.name),
            sql.SQL(" and ").join([*within(pages), *row_filter(self.reader.schema)]),
        )
        try:
            with self.reader.at_snapshot(sessions.reading, sessions.looking, pages):
                found = sessions.reading.execute(statement).fetchone()
        except psycopg.errors.InsufficientPrivilege:  # only single columns may be read, and xmin is none of them
            return False
        return found == (note.rows, note.rows)

    def _kept(self, sessions: Sessions, stretch: Stretch) -> StretchNote:
        assert stretch.note is not None
        sessions.tally.read(stretch.note.rows, stretch.note.size)
        for _ in stretch.units:
            sessions.tally.unit_done()
        return self._noted(replace(stretch.note, xmin=self.xmin, xmax=self.xmax))

    def _written(self, sessions: Sessions, stretch: Stretch) -> StretchNote:
        record = self.notes.record
        folder, kind = table_path(self.notes.root, record.path), lake_schema(record.schema)
        size = 0

        def tables() -> Iterator[pa.Table]:
            nonlocal size
            for batch in self.reader.rows_by(sessions, stretch.units):
                size += batch.nbytes
                yield as_stored(batch, kind)

        layout, parts = self._layout(gathered(tables()))
        files = tuple(written.file for written in write_rows(folder, kind, parts, layout))
        storage.sync_files(*(file.in_folder(folder) for file in files))  # a note is of files that are there for good
        pages, rows = stretch.pages, sum(file.rows or 0 for file in files)
        of = self.like[pages.relation_id]
        return self._noted(
            StretchNote(pages.relation_id, pages.first, pages.end, of, self.xmin, self.xmax, rows, size, files)
        )

    def _layout(self, parts: Iterator[pa.Table]) -> tuple[Layout, Iterator[pa.Table]]:
        """How files of the stretch are written that has these rows; its first ones tell."""
        if not self.layout.partition_by:
            return self.layout, parts
        first = list(islice(parts, 1))
        partitions = sum(part.group_by(list(self.layout.partition_by)).aggregate([]).num_rows for part in first)
        layout = self.layout if partitions <= FEW_PARTITIONS else replace(self.layout, partition_by=())
        return layout, chain(first, parts)

    def _noted(self, note: StretchNote) -> StretchNote:
        self.notes.write(note)
        return note


def deal(stretches: Sequence[Stretch], hands: int) -> list[str]:
    """Descriptions of the stretches in `hands` shares, of every `hands`-th each: large tables end evenly."""
    return [stretch.describe() for hand in range(hands) for stretch in stretches[hand::hands]]
