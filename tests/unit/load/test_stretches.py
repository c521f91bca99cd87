"""How a table's pages are cut into stretches, and what makes two of them alike."""

from __future__ import annotations

from dataclasses import replace

from headwater.delta.delta_log import DataFile
from headwater.delta.layout import PLAIN, Layout
from headwater.load.stretch_notes import StretchNote
from headwater.load.stretches import Stretch, cut_stretches, like, units_together
from headwater.load.units import PAGES_PER_UNIT, Extent, UnitReader
from headwater.position import Position
from headwater.schema import Column, Leaf, TableSchema, ValueType
from headwater.source.catalog.catalog import Signature
from headwater.source.snapshots import CapturePoint, VisibilitySnapshot

LEAF = Leaf(7, "public", "t", 1)
COLUMN = Column("id", 1, 0, -1, ValueType("int8", "bigint"))
SCHEMA = TableSchema(7, "public", "t", (COLUMN,), ("id",))
STEP = PAGES_PER_UNIT


def _pages(found: list[Stretch]) -> list[tuple[int, int | None]]:
    return [(stretch.pages.first, stretch.pages.end) for stretch in found]


def _note(first: int, end: int | None) -> StretchNote:
    file = DataFile("part.parquet", 10, 0, None, {}, None, 3)
    return StretchNote(7, first, end, "like", 10, 20, 3, 300, (file,))


def test_a_table_is_cut_into_stretches_of_units_the_last_of_which_has_no_end() -> None:
    extent = Extent(5 * STEP, 5 * STEP * 8192)
    found = cut_stretches(LEAF, extent, [], 2)
    assert _pages(found) == [(0, 2 * STEP), (2 * STEP, 4 * STEP), (4 * STEP, None)]
    assert [len(stretch.units) for stretch in found] == [2, 2, 1]
    assert _pages(cut_stretches(LEAF, Extent(0, 0), [], 2)) == [(0, None)]


def test_each_page_is_in_one_stretch_whatever_was_noted() -> None:
    extent = Extent(6 * STEP, 6 * STEP * 8192)
    for notes in (
        [(0, STEP), (STEP, 3 * STEP)],
        [(2 * STEP, 3 * STEP)],
        [(2 * STEP, 3 * STEP), (STEP, 4 * STEP)],  # overlapping: the one that begins first
        [(3 * STEP, None)],
        [(9 * STEP, None)],  # the table had more pages then
        [(0, None)],
        [(5, 5 + STEP)],
    ):
        found = cut_stretches(LEAF, extent, [_note(*pages) for pages in notes], 2)
        pages = _pages(found)
        assert pages[0][0] == 0
        assert pages[-1][1] is None
        assert [end for _, end in pages[:-1]] == [first for first, _ in pages[1:]]
        for stretch in found:
            if stretch.note is not None:
                assert (stretch.note.first, stretch.note.end) == (stretch.pages.first, stretch.pages.end)
        assert [stretch.note.first for stretch in found if stretch.note] == [min(notes)[0]] if len(notes) < 2 else True


def test_a_stretch_travels_as_text_with_its_note() -> None:
    for stretch in cut_stretches(LEAF, Extent(3 * STEP, 0), [_note(STEP, 2 * STEP)], 2):
        assert Stretch.described(stretch.describe()) == stretch


def test_every_connection_has_its_share_of_the_units() -> None:
    assert [units_together(units, 4) for units in (1, 4, 9, 32, 400)] == [1, 1, 3, 8, 8]


def test_rows_are_not_those_of_another_server_history_definition_secret_or_file() -> None:
    capture = CapturePoint("1-1", VisibilitySnapshot(10, 20, frozenset()), Position("1", 1, 100), None)  # type: ignore[arg-type]
    reader = UnitReader("", "1-1", SCHEMA.with_leaves((LEAF,)), {7: Signature(5, ((1, "id", 20, -1),))}, hash_key=b"k")
    others = [
        (reader, SCHEMA, PLAIN, replace(capture, position=Position("2", 1, 100))),
        (reader, SCHEMA, PLAIN, replace(capture, position=Position("1", 2, 100))),
        (replace(reader, hash_key=b"other"), SCHEMA, PLAIN, capture),
        (replace(reader, signatures={7: Signature(6, ((1, "id", 20, -1),))}), SCHEMA, PLAIN, capture),
        (reader, replace(SCHEMA, row_filter="id > 1"), PLAIN, capture),
        (reader, replace(SCHEMA, soft_delete=True), PLAIN, capture),
        (reader, SCHEMA, Layout(("id",)), capture),
        (reader, SCHEMA, Layout((), {"id": "col-1"}, {"id": 1}), capture),
    ]
    found = {like(reader, SCHEMA, PLAIN, capture)[7], *(like(*other)[7] for other in others)}
    assert len(found) == 1 + len(others)
    later = replace(capture, snapshot_id="2-2")
    assert like(replace(reader, snapshot_id="2-2"), SCHEMA, PLAIN, later) == like(reader, SCHEMA, PLAIN, capture)
