"""Two writers of one version: one has it, the other is refused. Ours by Spark is refused as well as ours by a link."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fixtures.entry_race import ENTRY, OF_SPARK, race, write_by_spark
from fixtures.jobs import in_thread
from fixtures.waiting import until
from headwater.delta import delta_log, storage
from headwater.delta.log_entries import log_entry
from headwater.errors import Refused
from headwater.spark.session import require_exclusive

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

ROUNDS = 300


@pytest.fixture
def table(spark: SparkSession, tmp_path: Path) -> str:
    folder = str(tmp_path / "t")
    spark.sql(f"create table delta.`{folder}` (id int) using delta")
    return folder


def test_an_entry_that_came_while_spark_was_writing_its_own_stays(
    spark: SparkSession, table: str, tmp_path: Path
) -> None:
    """Spark has looked and found no entry; then another writer puts one there."""
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    with open(os.open(pipe, os.O_RDWR), "wb", buffering=0) as held:
        writing = in_thread(lambda: write_by_spark(spark, table, 1, pipe))
        log = Path(table, "_delta_log")
        until(lambda: any(".tmp" in name for name in os.listdir(log)) or writing.done(), "Spark writes")
        storage.put_if_absent(log_entry(table, 1), ENTRY)
        held.write(b'{"commitInfo":{"operation":"of Spark"}}\n')
        # The last reader's end of file: no writer is left.
    failure = writing.exception(60)
    assert Path(log_entry(table, 1)).read_bytes() == ENTRY
    assert "FileAlreadyExistsException" in str(failure)
    assert not [name for name in os.listdir(log) if name.endswith(".tmp")]


def test_of_two_writers_at_the_same_moment_exactly_one_succeeds(
    spark: SparkSession, table: str, tmp_path: Path
) -> None:
    """Delta's own log store lets both succeed in one of 300 rounds: it looks, and then renames."""
    ours = 0
    for won, failure, content in race(spark, table, range(1, ROUNDS + 1), tmp_path, 0.0001):
        assert (failure is not None) == won
        assert content == (ENTRY if won else OF_SPARK)
        ours += won
    assert 0 < ours < ROUNDS


def test_an_entry_of_spark_is_whole_and_stays(spark: SparkSession, table: str, tmp_path: Path) -> None:
    lines = tmp_path / "lines"
    lines.write_text('{"commitInfo":{"operation":"of Spark"}}\n{"txn":{"appId":"a","version":1}}\n')
    write_by_spark(spark, table, 1, lines)
    assert Path(log_entry(table, 1)).read_text() == lines.read_text()
    with pytest.raises(FileExistsError):
        storage.put_if_absent(log_entry(table, 1), ENTRY)


def test_a_lost_race_is_decided_anew_by_delta_itself(spark: SparkSession, table: str) -> None:
    spark.sql(f"insert into delta.`{table}` values (1)")
    snapshot = delta_log.read_snapshot(table)
    info = delta_log.commit_info("ANOTHER", {}, {}, snapshot.version)
    delta_log.commit(table, snapshot.version + 1, [info])  # Spark has yet to see it
    spark.sql(f"insert into delta.`{table}` values (2)")
    assert spark.read.format("delta").load(table).count() == 2
    assert delta_log.read_commit_info(table, snapshot.version + 1)["operation"] == "ANOTHER"


def test_a_session_that_could_overwrite_commits_nothing_of_ours(spark: SparkSession, tmp_path: Path) -> None:
    require_exclusive(spark.newSession(), "/lake/t")
    with pytest.raises(Refused) as refused:  # which nothing of ours should come to
        require_exclusive(spark, "s3://lake/t")
    assert refused.value.code == "not_in_a_store"
    program = """
import sys
from pyspark.sql import SparkSession
from headwater.spark.jars import jar_paths
from headwater.spark.session import build_session, require_exclusive
from headwater.errors import Refused
builder = SparkSession.builder.master("local[1]").config("spark.ui.enabled", "false")
builder = builder.config("spark.jars", ",".join(jar_paths()[:-1]))
builder = builder.config("spark.sql.extensions", "io.delta.sql.DeltaSparkSessionExtension")
builder.getOrCreate()
spark = build_session()
spark.range(3).write.format("delta").save(sys.argv[1])
assert spark.read.format("delta").load(sys.argv[1]).count() == 3  # a user's own
try:
    require_exclusive(spark, "/lake/t")
except Refused as refused:
    print(refused.code)
"""
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "t")], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.split() == ["no_log_store"], done.stderr[-3000:]
