"""Tables with `soft_delete`: the same random batches leave the same living and marked rows on both ways."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from deltalake import DeltaTable

from fixtures.twins import FENCE, KEEP_CUTS, KEYS, Row, Twins, by_delta_rs, by_polars, normal, on_disk, schema_of
from headwater.apply import whole_table
from headwater.apply.applier import Applier
from headwater.apply.direct import Fence
from headwater.delta.row_count import row_count
from headwater.lake.registry import TableRecord
from headwater.log.blocks import Transactions
from headwater.log.net.soft_delete import marked
from headwater.net_changes import Deletions, NetChanges
from headwater.schema import DELETED, DELETED_AT, DELETED_LSN

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

_EPOCH = datetime(2000, 1, 1, tzinfo=UTC)


@dataclass
class MarkedTwins(Twins):
    """Twins whose deleted rows stay. `gone`: these, and by which commit."""

    gone: dict[int, tuple[Row, int]] = field(default_factory=dict)

    def batch(self, *, lies: bool = False) -> NetChanges:
        before = dict(self.model)
        changes = super().batch(lies=lies)
        self._follow(before)
        if lies:
            return changes
        # Some rows are deleted again before the batch ends.
        number_of = {self.key(number): number for number in range(self.universe)}
        deleted = np.array(changes.rows[DELETED], dtype=np.bool_)
        again = []
        for index, key in enumerate(zip(*(changes.rows[k].to_pylist() for k in self.schema.key), strict=True)):
            number = number_of[key]
            if not deleted[index] and self.chance.random() < 0.2:
                self.gone[number] = (self.model.pop(number), self.lsn + 1)
                again.append(index)
        return self.with_marks(changes, again)

    def _follow(self, before: dict[int, Row]) -> None:
        for number in before.keys() - self.model.keys():
            self.gone[number] = (before[number], self.lsn + 1)
        for number in self.model:
            self.gone.pop(number, None)

    def truncate(self) -> NetChanges:
        """A TRUNCATE, and a few rows that come after it."""
        self.gone |= {number: (row, self.lsn + 1) for number, row in self.model.items()}
        numbers = self.chance.sample(range(self.universe), 20)
        self.model = {number: self.row(number) for number in numbers}
        self._follow({})
        rows = list(self.model.values())
        changes = self.changes(rows, [False] * 20, [False] * 20, [None] * 20, [])
        moment = int(((_EPOCH + timedelta(microseconds=self.lsn + 1)).timestamp()) * 1_000_000)
        return replace(changes, emptied={1: (self.lsn + 1, moment)}, truncated_leaves=(1,))

    def changes(
        self, rows: list[Row], stored: list[bool], unchanged: list[bool], origins: list[Any], removed: list[Any]
    ) -> NetChanges:
        found = super().changes(rows, stored, unchanged, origins, removed)
        deletions = Deletions(np.full(len(rows), -1), np.zeros(len(removed), dtype=np.int64), {})
        return marked(self.schema, replace(found, deletions=deletions), self._transactions())

    def with_marks(self, changes: NetChanges, indices: Iterable[int]) -> NetChanges:
        chosen = np.isin(np.arange(changes.rows.num_rows), list(indices))
        deleted = chosen | np.array(changes.rows[DELETED], dtype=np.bool_)
        deletions = Deletions(np.where(deleted, 0, -1), np.zeros(0, dtype=np.int64), {})
        rows = changes.rows.drop_columns([DELETED, DELETED_LSN, DELETED_AT])
        return marked(self.schema, replace(changes, rows=rows, deletions=deletions), self._transactions())

    def _transactions(self) -> Transactions:
        lsn = np.array([self.lsn + 1])
        return Transactions(np.array([7]), lsn, lsn, np.array([0]))

    def expected(self) -> list[str]:
        nothing = {DELETED: False, DELETED_LSN: None, DELETED_AT: None}
        living = [{**row, **nothing} for row in self.model.values()]
        dead = [
            {**row, DELETED: True, DELETED_LSN: lsn, DELETED_AT: _EPOCH + timedelta(microseconds=lsn)}
            for row, lsn in self.gone.values()
        ]
        return sorted(repr(normal(row)) for row in [*living, *dead])


def make_marked_twins(
    spark: SparkSession, folder: Path, kind: str, on_divergence: str = "suspend", seed: int | None = None
) -> MarkedTwins:
    keys, key = KEYS[kind]
    schema = replace(schema_of(keys), soft_delete=True)
    record = TableRecord(
        "public.t", "public/t", "active", incarnation=1, on_divergence=on_divergence, schemas=((0, schema),)
    )
    chance = random.Random(seed if seed is not None else random.randrange(1 << 30))
    applier = Applier(lambda: spark, Fence(FENCE, 1))
    twins = MarkedTwins(applier, record, key, folder / "direct", folder / "merged", chance)
    for path in (twins.direct, twins.merged):
        whole_table.create(str(path), schema, KEEP_CUTS)
    return twins


@pytest.mark.parametrize("kind", ["bigint", "text and date"])
def test_deleted_rows_stay_marked_and_come_to_life_again_on_both_ways(
    spark: SparkSession, tmp_path: Path, kind: str
) -> None:
    twins = make_marked_twins(spark, tmp_path, kind)
    revived = batches = 0
    while batches < 4 or not revived:
        batches += 1
        before = set(twins.gone)
        changes = twins.batch()
        # Every other one as a large transaction comes.
        direct, merged = twins.apply(on_disk(changes, tmp_path, 3) if batches % 2 else changes)
        revived += len(before & set(twins.model))
        assert (direct.divergence, merged.divergence) == (0, 0), (direct, merged)
        twins.assert_as_the_model()
    twins.assert_as_the_model(spark)
    for folder in (twins.direct, twins.merged):
        assert row_count(str(folder), DeltaTable(str(folder)).version(), soft_delete=True) == len(twins.model)


def test_a_truncate_marks_every_row_that_lives(spark: SparkSession, tmp_path: Path) -> None:
    twins = make_marked_twins(spark, tmp_path, "uuid")
    for large in (False, True):
        twins.apply(twins.batch())
        changes = twins.truncate()
        direct, merged = twins.apply(on_disk(changes, tmp_path, 3) if large else changes, "replace")
        assert (direct.divergence, merged.divergence) == (0, 0), (direct, merged)
        twins.assert_as_the_model()
    direct = twins.write(twins.batch())
    assert direct.divergence == 0
    twins.assert_as_the_model(spark, merged=False)


@pytest.mark.parametrize("policy", ["suspend", "report", "repair"])
def test_a_change_that_meets_a_marked_row_has_diverged_as_if_it_met_none(
    spark: SparkSession, tmp_path: Path, policy: str
) -> None:
    twins = make_marked_twins(spark, tmp_path, "two integers", policy)
    twins.apply(twins.changes([twins.row(n) for n in (1, 2, 3)], [False] * 3, [False] * 3, [None] * 3, []))
    twins.apply(twins.changes([], [], [], [], [twins.key(1), twins.key(2)]))
    before = by_delta_rs(twins.direct)
    lies = twins.changes([twins.row(n) for n in (1, 3)], [True, False], [False] * 2, [None] * 2, [twins.key(2)])
    for text in twins.contradicted(lies):
        for said in ("update met no row at key (", "insert met a row at key (", "delete met no row at key ("):
            assert said in text
    assert by_delta_rs(twins.direct) == by_delta_rs(twins.merged)
    assert (by_delta_rs(twins.direct) == before) == (policy != "repair")


@pytest.mark.parametrize("policy", ["suspend", "report", "repair"])
def test_a_change_before_a_truncate_that_met_no_living_row_has_diverged(
    spark: SparkSession, tmp_path: Path, policy: str
) -> None:
    """The log updates a row that is marked as deleted and one that is missing, truncates, and puts both again, with a
    row that is stored and one that is not."""
    twins = make_marked_twins(spark, tmp_path, "two integers", policy)
    twins.fill(twins.changes([twins.row(n) for n in (1, 3, 5)], [False] * 3, [False] * 3, [None] * 3, []))
    twins.fill(twins.changes([], [], [], [], [twins.key(1)]))
    before = by_delta_rs(twins.direct)
    rows = [twins.row(n) for n in (1, 2, 3, 4)]
    lies = twins.changes(rows, [True, True, False, False], [False] * 4, [None] * 4, [])
    lies = replace(lies, emptied={1: (twins.lsn, twins.lsn)}, truncated_leaves=(1,))
    for large in (False, True) if policy == "suspend" else (True,):
        changes = on_disk(lies, tmp_path, 3) if large else lies
        for text in twins.contradicted(changes, 2, "replace"):
            assert text.count("update met no row at key (") == 2
            assert "insert met" not in text, "what was truncated is not there any more"
    after = by_delta_rs(twins.direct)
    assert after == by_delta_rs(twins.merged)
    assert (after == before) == (policy == "suspend")
    assert len(after) == {"suspend": 3, "report": 4, "repair": 5}[policy]


def test_upkeep_keeps_marked_rows(spark: SparkSession, tmp_path: Path) -> None:
    twins = make_marked_twins(spark, tmp_path, "bigint")
    path = str(twins.direct)
    for _ in range(60):
        changes = twins.batch()
        twins.lsn += 1
        applied = twins.applier.commit(twins.plan(twins.direct, changes, "positional"))
        assert applied.divergence == 0
        twins.applier.keep_up(path, twins.schema, applied.version)
    assert by_polars(twins.direct) == twins.expected()
