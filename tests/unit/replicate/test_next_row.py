"""What the next ledger row says of a table."""

from __future__ import annotations

from headwater.lake.ledger import TableVersion
from headwater.lake.registry import TableRecord
from headwater.replicate.tables.next_row import NextRow

NAME = "public.t"


def test_files_that_are_rearranged_before_a_row_says_what_was_applied_take_nothing_from_it() -> None:
    """A row may be withheld while another table is ahead of it, and upkeep goes on meanwhile."""
    row = NextRow(lambda name: TableRecord(name, "public/t", "active"))
    row.note({NAME: TableVersion(7, 100, "active", 25, "positional", touched=True)})
    row.rearranged({NAME: TableVersion(8, 100, "active", 0, "positional")})
    said = row.touched()
    assert said == {NAME: TableVersion(8, 100, "active", 25, "positional", touched=True)}
    row.written(said)
    row.rearranged({NAME: TableVersion(9, 100, "active")})
    assert row.versions() == {NAME: TableVersion(9, 100, "active", 0, "positional")}
    row.rearranged({NAME: TableVersion(10, 200, "active")})
    assert row.versions()[NAME].version == 9, "rows that no row has yet are none of it"
