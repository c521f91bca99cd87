"""The content of a table, or of a part of it, made ready beside its writer: however much changes meanwhile, the commit
that names it leaves the table as the source has it, and what comes behind finds every row."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from fixtures.twins import APP, FENCE, KEEP_CUTS, KEYS, Twins, schema_of
from headwater.apply import whole_table
from headwater.apply.applier import Applier
from headwater.apply.direct import Fence, bring_forward
from headwater.apply.file_keys import KeyFiles, Numbered
from headwater.apply.made_ready import MadeReady, on_rows_of
from headwater.apply.plan import Plan, PlanAgain, choose
from headwater.apply.waiting_files import WaitingFiles
from headwater.arrow_types import lake_schema
from headwater.delta.deletion_vectors import vector_file
from headwater.delta.delta_log import read_snapshot
from headwater.delta.index import kept_index
from headwater.delta.layout import layout_of
from headwater.delta.metadata import becoming
from headwater.delta.new_files import write_rows
from headwater.delta.small_tables import LostRace
from headwater.errors import Diverged, Refused
from headwater.lake.registry import TableRecord
from headwater.net_changes import NetChanges
from headwater.predicate import IsNull, OneOf, Predicate

LEVEL = OneOf("level", (0,))


def no_spark() -> Any:
    pytest.fail("Spark was asked for")


@pytest.fixture
def applier() -> Iterator[Applier]:
    made = Applier(no_spark, Fence(FENCE, 1))
    yield made
    made.close()


def table_of(applier: Applier, folder: Path, kind: str, seed: int, partition_by: tuple[str, ...] = ()) -> Twins:
    """A table with the changes of some batches."""
    keys, key = KEYS[kind]
    record = TableRecord("public.t", "public/t", "active", incarnation=1, schemas=((0, schema_of(keys, partition_by)),))
    twins = Twins(applier, record, key, folder / "direct", folder / "merged", random.Random(seed))
    whole_table.create(str(twins.direct), twins.schema, KEEP_CUTS)
    for _ in range(3):
        twins.write(twins.batch())
    return twins


class Making:
    """What a driver does for a reload, without one."""

    def __init__(self, twins: Twins, emptied: Predicate | None = None, becomes: Any = None) -> None:
        self.twins, self.emptied, self.schema = twins, emptied, becomes or twins.schema
        folder = str(twins.direct)
        snapshot = read_snapshot(folder)
        metadata = becoming(snapshot, self.schema) if becomes is not None else snapshot.metadata
        rows = [row for row in twins.model.values() if emptied is None or row["level"] == 0]
        kind = lake_schema(self.schema)
        # As several tasks write them.
        parts = [pa.Table.from_pylist(rows[at::3], schema=kind) for at in range(3)]
        self.files = [
            one.file for part in parts for one in write_rows(folder, kind, [part], layout_of(metadata)) if part.num_rows
        ]
        self.becomes, self.model = becomes, twins.model
        base = twins.applier.base(*twins.at(folder), len(self.files), part=emptied is not None)
        assert base is not None
        waiting = WaitingFiles(folder, tuple(self.files))
        self.ready = MadeReady(base, self.schema, waiting, emptied, lambda: None, becomes=becomes is not None)

    def bring_forward(self, changes: NetChanges) -> None:
        if self.emptied is not None:
            changes = on_rows_of(self.emptied, changes, self.schema)
        record = replace(self.twins.record, on_divergence="repair", schemas=((0, self.schema),))
        path, because = choose(changes, self.schema, "")
        if not changes.is_empty:
            plan = Plan(record, str(self.twins.direct), "", self.ready.rows.version, 0, changes, path, because)
            bring_forward(self.ready, plan)

    def commit(self) -> Any:
        twins = self.twins
        twins.lsn += 1
        changes = self.ready.as_changes()
        path, because = choose(changes, self.schema, "")
        record = replace(twins.record, on_divergence="repair")
        plan = replace(twins.plan(twins.direct, changes, path), record=record, because=because, becomes=self.becomes)
        return twins.applier.commit(replace(plan, counters={f"{APP}/reload/r": 1}, refuses_divergence=False))


def with_all_values(twins: Twins, changes: NetChanges) -> NetChanges:
    """The same where the log carries every value."""
    keys = twins.schema.key
    known = {tuple(row[name] for name in keys): row for row in twins.model.values()}
    rows = [known[tuple(row[name] for name in keys)] for row in changes.rows.to_pylist()]
    return replace(changes, rows=pa.Table.from_pylist(rows, schema=changes.rows.schema), unchanged={}, origins=None)


@pytest.mark.parametrize("seed", range(6))
@pytest.mark.parametrize("kind", ["bigint", "text and date"])
def test_a_whole_table_goes_on_meanwhile_and_is_as_the_source_then(
    applier: Applier, tmp_path: Path, kind: str, seed: int
) -> None:
    twins = table_of(applier, tmp_path, kind, seed)
    truth = dict(twins.model)
    twins.write(twins.batch())  # what the source never had
    twins.model = truth
    making = Making(twins)
    kept = []
    for _ in range(4):
        # It contradicts the table as it stands, not the one that is made ready.
        kept.append(twins.batch())
        if len(kept) == 2:
            making.bring_forward(kept[0])
            making.bring_forward(kept[1])
    for late in kept[2:]:
        making.bring_forward(late)
    making.commit()
    twins.assert_as_the_model(merged=False)
    assert read_snapshot(str(twins.direct)).transactions[f"{APP}/reload/r"] == 1
    for _ in range(3):
        assert twins.write(twins.batch()).divergence == 0
    twins.assert_as_the_model(merged=False)


@pytest.mark.parametrize("seed", range(8))
def test_a_part_takes_the_place_of_its_rows_wherever_they_stand(applier: Applier, tmp_path: Path, seed: int) -> None:
    twins = table_of(applier, tmp_path, "bigint", seed, ("level",))
    truth = dict(twins.model)
    mine = [number for number, row in truth.items() if row["level"] == 0]
    free = [number for number in range(100) if number not in truth]
    # By mistake: a row of the part stands outside of it, another is not there, one is there that the source has not.
    wrong = [{**truth[mine[0]], "level": 7}, {**twins.row(free[0]), "level": 0}]
    twins.write(twins.changes(wrong, [True, False], [False, False], [None, None], [twins.key(mine[1])]))
    making = Making(twins, LEVEL)
    for _ in range(3):
        touched = twins.batch()
        changes = with_all_values(twins, touched)
        # The table's own writer repairs what contradicts it.
        record, twins.record = twins.record, replace(twins.record, on_divergence="repair")
        twins.write(changes)
        twins.record = record
        making.bring_forward(changes)
    making.commit()
    twins.assert_as_the_model(merged=False)
    for _ in range(3):
        assert twins.write(twins.batch()).divergence == 0
    twins.assert_as_the_model(merged=False)


def test_a_table_takes_another_shape_in_the_commit_that_names_its_files(applier: Applier, tmp_path: Path) -> None:
    twins = table_of(applier, tmp_path, "bigint", 1, ("level",))
    shape = replace(twins.schema, partition_by=())
    making = Making(twins, becomes=shape)
    making.bring_forward(twins.batch())
    making.commit()
    snapshot = read_snapshot(str(twins.direct))
    assert snapshot.metadata["partitionColumns"] == []
    later = twins.batch()
    twins.record = replace(twins.record, schemas=((0, shape),))
    assert twins.write(later).divergence == 0
    twins.assert_as_the_model(merged=False)


def test_where_the_table_was_read_anew_meanwhile_its_keys_are_read_from_the_files(
    applier: Applier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    twins = table_of(applier, tmp_path, "uuid", 3)
    making = Making(twins)
    applier.forget(str(twins.direct))
    read, keys_in = [], KeyFiles.read

    def noted(self: KeyFiles, one: Numbered) -> Any:
        read.append(one.file.name)
        return keys_in(self, one)

    monkeypatch.setattr(KeyFiles, "read", noted)
    making.bring_forward(twins.batch())
    making.commit()
    assert twins.write(twins.batch()).divergence == 0
    assert {file.name for file in making.files} <= set(read)
    twins.assert_as_the_model(merged=False)


def test_keys_are_not_read_again_in_the_turn_of_the_writer(
    applier: Applier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    twins = table_of(applier, tmp_path, "uuid", 4)
    making = Making(twins)
    making.bring_forward(twins.batch())
    monkeypatch.setattr(KeyFiles, "read", lambda *_: pytest.fail("keys were read"))
    making.commit()
    assert twins.write(twins.batch()).divergence == 0
    twins.assert_as_the_model(merged=False)


def test_a_lost_race_leaves_what_was_made_ready_for_the_next_attempt(
    applier: Applier, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    twins = table_of(applier, tmp_path, "bigint", 5)
    making = Making(twins)

    def lost(*_: Any, **__: Any) -> None:
        raise LostRace("another was faster")

    with monkeypatch.context() as patched:
        patched.setattr("headwater.delta.delta_log.commit", lost)
        with pytest.raises(PlanAgain):
            making.commit()
    making.bring_forward(twins.batch())
    making.commit()
    twins.assert_as_the_model(merged=False)


def test_files_that_a_vacuum_took_are_named_before_anything_is_done(applier: Applier, tmp_path: Path) -> None:
    twins = table_of(applier, tmp_path, "bigint", 6)
    version = read_snapshot(str(twins.direct)).version
    making = Making(twins)
    gone = making.files[0]
    Path(gone.in_folder(str(twins.direct))).unlink()
    base = applier.base(*twins.at(str(twins.direct)), 1, part=False)
    assert base is not None
    waiting = WaitingFiles(str(twins.direct), tuple(making.files))
    with pytest.raises(Refused, match=r"1 of the \d+ files of rows that were read are gone"):
        MadeReady(base, twins.schema, waiting, None, lambda: None, becomes=False)
    assert read_snapshot(str(twins.direct)).version == version


def test_behind_a_truncate_a_row_that_came_back_elsewhere_is_found(applier: Applier, tmp_path: Path) -> None:
    twins = table_of(applier, tmp_path, "bigint", 3, ("level",))
    number = next(number for number, row in twins.model.items() if row["level"] == 0)
    making = Making(twins, LEVEL)
    back = {**twins.row(number), "level": 7}
    emptied = replace(twins.changes([back], [False], [False], [None], []), truncated=True)
    twins.model = {number: back}
    twins.write(emptied, "replace")
    making.bring_forward(emptied)
    making.commit()
    twins.assert_as_the_model(merged=False)
    twins.model = {number: {**back, "big": "anew"}}
    assert twins.write(twins.changes([twins.model[number]], [True], [False], [None], [])).divergence == 0
    twins.assert_as_the_model(merged=False)


def test_a_predicate_is_not_judged_by_a_value_that_the_log_left_out(applier: Applier, tmp_path: Path) -> None:
    twins = table_of(applier, tmp_path, "bigint", 7)
    number, row = next(iter(twins.model.items()))
    kept = twins.changes([{**row, "big": None}], [True], [True], [None], [])
    named = replace(twins.schema, name="Order Lines")
    with pytest.raises(
        Diverged, match="keep values that the log does not carry, and that the predicate is about"
    ) as caught:
        on_rows_of(IsNull("big", negated=True), kept, named)
    assert caught.value.remedy.endswith(f'--table {named.schema}."Order Lines"'), "as with_file can quote it"
    assert on_rows_of(OneOf("id", (row["id"],)), kept, twins.schema).rows.num_rows == 1
    assert twins.key(number) == (row["id"],)


def test_what_changes_took_the_place_of_is_removed_and_nothing_that_a_commit_names(
    applier: Applier, tmp_path: Path
) -> None:
    twins = table_of(applier, tmp_path, "bigint", 8)

    def unnamed() -> set[str]:
        found = read_snapshot(str(twins.direct)).files.values()
        named = {file.name for file in found} | {vector_file("", file.vector) for file in found if file.vector}
        return {path.name for path in twins.direct.iterdir() if path.is_file()} - named

    before = unnamed()
    making = Making(twins)
    for _ in range(5):
        making.bring_forward(twins.batch())
    making.model = dict(twins.model)
    other = Making(twins)
    for _ in range(3):
        other.bring_forward(twins.batch())
    other.ready.give_up()
    assert {file.name for file in other.files} <= unnamed(), "the rows that were read may be asked for again"
    for file in other.files:
        Path(file.in_folder(str(twins.direct))).unlink()
    old = {file.name for file in read_snapshot(str(twins.direct)).files.values()}
    making.commit()
    making.ready.discard_left_over()
    left = unnamed() - before - old
    assert not [name for name in left if name.endswith(".parquet")], left
    twins.model = making.model
    twins.assert_as_the_model(merged=False)


@pytest.mark.parametrize("seed", range(4))
def test_a_table_whose_index_is_kept_and_was_not_asked_for_yet_takes_what_was_made_ready(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(kept_index, "WORTH_KEEPING", 1)
    first = Applier(no_spark, Fence(FENCE, 1))
    twins = table_of(first, tmp_path, "bigint", seed)
    first.close()  # which keeps the index
    second = twins.applier = Applier(no_spark, Fence(FENCE, 1))
    making = Making(twins)
    twins.model = dict(twins.model)
    changes = twins.batch()
    assert twins.write(changes).divergence == 0  # now the index is asked for
    making.bring_forward(changes)
    making.commit()
    twins.assert_as_the_model(merged=False)
    for _ in range(3):
        assert twins.write(twins.batch()).divergence == 0
    twins.assert_as_the_model(merged=False)
    second.close()
