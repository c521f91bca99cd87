"""A slow table does not hold the others up, and what they do meanwhile is in no cut before it has caught up."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from deltalake import DeltaTable

from fixtures.bank import Bank, replicated_bank, writing
from fixtures.jobs import Job, armed, catch_up, following, until
from headwater.demo.postgres import EmbeddedServer
from headwater.lake.ledger import read_epoch
from headwater.lake.paths import table_path

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.postgres, pytest.mark.spark]

SLOW, FAST = "public.documents", "public.entries"


@pytest.fixture(scope="module")
def bank(postgres: EmbeddedServer, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bank]:
    with replicated_bank(postgres, tmp_path_factory.mktemp("bank"), seed=7) as bank:
        yield bank


def version(bank: Bank, name: str) -> int:
    found: int = DeltaTable(table_path(bank.pipeline.lake_path(), name.replace(".", "/"))).version()
    return found


def newest(bank: Bank) -> int:
    epoch = read_epoch(bank.pipeline.lake_path())
    assert epoch is not None
    return epoch.epoch


def test_fast_tables_run_ahead_and_no_row_appears_before_the_slow_one_has_caught_up(bank: Bank, tmp_path: Path) -> None:
    with armed(tmp_path, f"replicate.before_table_commit@{SLOW}") as hold, following(bank.pipeline) as driver:
        with writing(bank.database, seed=11):
            hold.reached(driver)
            stopped_at, fast = newest(bank), version(bank, FAST)
            slow = version(bank, SLOW)
            until(lambda: version(bank, FAST) >= fast + 4, "the fast table goes on by several batches")
            assert version(bank, SLOW) == slow
            # The batch whose slow share is held has no row, so neither has any later one.
            assert newest(bank) <= stopped_at + 1
            hold.release()
            until(lambda: newest(bank) > stopped_at + 3, "rows appear again")
        until(lambda: version(bank, SLOW) > slow, "the slow table has caught up")
    caught_up = [epoch for epoch in bank.epochs() if epoch.epoch > stopped_at]
    # What the slow table took at once is one step of it, and one row for all tables.
    steps = [after.tables[FAST].version - before.tables[FAST].version for before, after in pairwise(caught_up)]
    assert max(steps) >= 3, steps
    catch_up(bank.pipeline)
    bank.assert_exact()


def test_a_driver_that_dies_while_tables_are_apart_leaves_a_lake_that_the_next_one_makes_whole(
    bank: Bank, spark: SparkSession, tmp_path: Path
) -> None:
    hold = f"replicate.before_table_commit@{SLOW}=hold:{tmp_path / 'slow'}"
    with (
        Job(bank.pipeline, "replicate", failpoint=hold, spark=spark) as job,
        writing(bank.database, seed=12),
    ):
        until(lambda: (tmp_path / "slow.held").exists(), "the slow table is held")
        fast = version(bank, FAST)
        until(lambda: version(bank, FAST) >= fast + 3, "the fast table goes on")
        job.process.kill()
        job.wait()
        until(lambda: not job.left, f"nothing of it is left: {job.left}", 20)
    catch_up(bank.pipeline)
    bank.assert_exact()
