"""What a user may do to a replicated table with another program, and what comes of it: one case for each row of
docs/reference/foreign-writes.md.

Each case has a table of its own, loaded and followed once. All that is done comes while a driver runs to which nothing
comes from the source; the tables of a few cases are harmed once more while none does. Then every table is written at
the source, and what was suspended is loaded again.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pyarrow as pa
import pytest
from deltalake import DeltaTable, Field, TableFeatures, write_deltalake

from fixtures.jobs import (
    Outcome,
    armed,
    assert_equal,
    catch_up,
    following,
    lake_path_of,
    lake_rows,
    record_of,
    registry_of,
    states_of,
    until,
)
from fixtures.lake_waits import wait
from fixtures.loaded import loaded_pipeline
from fixtures.postgres import Database
from headwater.delta import delta_log
from headwater.delta.log_entries import log_entry
from headwater.lake.ledger import read_all
from headwater.lake.position_file import read_position_file
from headwater.load.load import load
from headwater.monitor.status import status
from headwater.names import TableName
from headwater.pipeline_file.pipeline import Pipeline
from headwater.reload.reload import reload
from headwater.spark.session import build_session
from headwater.verify.verify import verify
from headwater.waiting.result import WaitResult

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.postgres, pytest.mark.spark]

NOTICED_WITHIN = 30.0
FOREIGN = pa.table({"id": pa.array([99], pa.int32()), "n": pa.array([1], pa.int32()), "note": ["foreign"]})


@dataclass(frozen=True)
class Table:
    """The table of a case, for another program."""

    spark: SparkSession
    path: str

    def sql(self, *statements: str) -> None:
        """`{t}` is the table."""
        for statement in statements:
            self.spark.sql(statement.format(t=f"delta.`{self.path}`"))

    @property
    def rust(self) -> Any:
        return DeltaTable(self.path)

    def make_old(self) -> None:
        """As if all its files had been written two hours ago."""
        for file in Path(self.path).rglob("*"):
            os.utime(file, (time.time() - 7200,) * 2)


Harm = Callable[[Table], Any]


def sql(*statements: str) -> Harm:
    return lambda table: table.sql(*statements)


def properties(**values: str) -> Harm:
    said = ", ".join(f"'{name.replace('_', '.')}' = '{value}'" for name, value in values.items())
    return sql(f"alter table {{t}} set tblproperties ({said})")


def rust(how: Callable[[Any], Any]) -> Harm:
    return lambda table: how(table.rust)


def _drop(table: Table) -> None:
    shutil.rmtree(table.path)


def _create_again(table: Table) -> None:
    shutil.rmtree(table.path)
    write_deltalake(table.path, FOREIGN)
    for _ in range(6):
        write_deltalake(table.path, FOREIGN, mode="append")


def _vacuum_full(table: Table) -> None:
    table.make_old()
    table.rust.vacuum(dry_run=False, full=True)


def _merge(table: Table) -> None:
    merging = table.rust.merge(FOREIGN, "t.id = s.id", source_alias="s", target_alias="t")
    merging.when_not_matched_insert_all().execute()


def _replace_entry(table: Table) -> None:
    """As a Spark does that has looked for an entry before ours was put: it renames its own over it."""
    version = table.rust.version()
    entry = Path(log_entry(table.path, version))
    scratch = entry.with_name(f".{entry.name}.tmp")
    info = delta_log.commit_info("OPTIMIZE", {}, {}, version - 1)
    info["commitInfo"]["engineInfo"] = "Apache-Spark"
    scratch.write_text("\n".join(map(delta_log._compact, [info])) + "\n")
    scratch.rename(entry)


@dataclass(frozen=True)
class Case:
    """`reason`: a part of why the table is suspended, by a driver that runs and by one that starts; empty: it is not,
    and goes on. `at_start`: where the second says it differently."""

    harm: Harm
    reason: str = ""
    mapped: bool = False
    at_start: str = ""


SOMEBODY = "was written by another program"
CASES = {
    # Spark, files
    "`OPTIMIZE`": Case(sql("optimize {t}")),
    "`OPTIMIZE … ZORDER BY`": Case(sql("optimize {t} zorder by (n)")),
    "`REORG TABLE … APPLY (PURGE)`": Case(sql("reorg table {t} apply (purge)")),
    "`VACUUM`": Case(sql("vacuum {t}")),
    # Spark, rows
    "`INSERT`": Case(sql("insert into {t} values (99, 1, 'foreign')"), SOMEBODY),
    "`INSERT OVERWRITE`": Case(sql("insert overwrite {t} values (99, 1, 'foreign')"), SOMEBODY),
    "`DELETE`": Case(sql("delete from {t} where id = 5"), SOMEBODY),
    "`DELETE` of no row": Case(sql("delete from {t} where id = 5000")),
    "`UPDATE`": Case(sql("update {t} set n = 0 where id = 5"), SOMEBODY),
    "`MERGE`": Case(sql("merge into {t} t using (select 5 as i) on t.id = i when matched then delete"), SOMEBODY),
    "`TRUNCATE`": Case(sql("truncate table {t}"), SOMEBODY),
    "`RESTORE`": Case(sql("restore table {t} to version as of 1"), SOMEBODY),
    # Spark, columns
    "`ADD COLUMN`": Case(sql("alter table {t} add column extra int"), "columns (with extra)"),
    "`RENAME COLUMN`": Case(
        sql("alter table {t} rename column `a note` to remark"), "columns (without a note; with remark)", mapped=True
    ),
    "`DROP COLUMN`": Case(sql("alter table {t} drop column `a note`"), "columns (without a note)", mapped=True),
    "`ALTER COLUMN … TYPE`": Case(
        sql(
            "alter table {t} set tblproperties ('delta.enableTypeWidening' = 'true')",
            "alter table {t} alter column n type bigint",
        ),
        "columns (other: n)",
    ),
    "`ALTER COLUMN … FIRST`, `AFTER`": Case(sql("alter table {t} alter column n first")),
    "`ALTER COLUMN … SET DEFAULT`": Case(
        sql(
            "alter table {t} set tblproperties ('delta.feature.allowColumnDefaults' = 'supported')",
            "alter table {t} alter column n set default 7",
        )
    ),
    "`COMMENT` on the table or a column": Case(
        sql("comment on table {t} is 'known'", "alter table {t} alter column n comment 'known'")
    ),
    # Spark, properties and features
    "A property of your own": Case(properties(mine="true")),
    "Retention, checkpoints, statistics, file sizes": Case(
        properties(delta_logRetentionDuration="interval 30 days", delta_dataSkippingNumIndexedCols="2")
    ),
    "`delta.enableChangeDataFeed`": Case(properties(delta_enableChangeDataFeed="true")),
    "`delta.enableRowTracking`": Case(properties(delta_enableRowTracking="true")),
    "`delta.enableDeletionVectors` off": Case(properties(delta_enableDeletionVectors="false")),
    "`delta.columnMapping.mode` = `name`": Case(properties(delta_columnMapping_mode="name")),
    "`delta.appendOnly`": Case(properties(delta_appendOnly="true"), "sets delta.appendOnly, which has to be unset"),
    "`ADD CONSTRAINT`": Case(sql("alter table {t} add constraint small check (n < 5000)")),
    "A constraint that a row of the source breaks": Case(
        sql("alter table {t} add constraint smaller check (n < 1000)"), "constraint smaller"
    ),
    "`CLUSTER BY`": Case(sql("alter table {t} cluster by (n)")),
    # Another table
    "`CREATE OR REPLACE TABLE`": Case(
        sql("create or replace table {t} using delta as select 1 as id, 1 as n, 'another' as note"), SOMEBODY
    ),
    "The folder is removed": Case(_drop, "gone from the lake"),
    "The table is dropped and created again": Case(_create_again, "over the commit that was there"),
    # delta-rs
    '`write_deltalake(…, mode="append")`': Case(
        lambda table: write_deltalake(table.path, FOREIGN, mode="append"), SOMEBODY
    ),
    '`write_deltalake(…, mode="overwrite")`': Case(
        lambda table: write_deltalake(table.path, FOREIGN, mode="overwrite"), SOMEBODY
    ),
    "`delete`": Case(rust(lambda table: table.delete("id = 5")), SOMEBODY),
    "`update`": Case(rust(lambda table: table.update(updates={"n": "0"}, predicate="id = 5")), SOMEBODY),
    "`merge`": Case(_merge, SOMEBODY),
    "`optimize.compact`": Case(rust(lambda table: table.optimize.compact())),
    "`optimize.z_order`": Case(rust(lambda table: table.optimize.z_order(["n"]))),
    "`vacuum`": Case(rust(lambda table: table.vacuum(dry_run=False))),
    "`vacuum(full=True)`": Case(_vacuum_full, "removed files that it needs"),
    "`create_checkpoint`": Case(rust(lambda table: table.create_checkpoint())),
    "`cleanup_metadata`": Case(rust(lambda table: table.cleanup_metadata())),
    "`repair`": Case(rust(lambda table: table.repair())),
    "`restore`": Case(rust(lambda table: table.restore(1)), SOMEBODY),
    "`alter.add_columns`": Case(
        rust(lambda table: table.alter.add_columns([Field("extra", "integer")])), "columns (with extra)"
    ),
    "`alter.set_table_properties`": Case(
        rust(lambda table: table.alter.set_table_properties({"delta.logRetentionDuration": "interval 30 days"}))
    ),
    "`alter.add_constraint`": Case(rust(lambda table: table.alter.add_constraint({"small": "n < 5000"}))),
    "`alter.add_feature`": Case(
        rust(lambda table: table.alter.add_feature(TableFeatures.ChangeDataFeed, allow_protocol_versions_increase=True))
    ),
    "`alter.set_table_description`": Case(rust(lambda table: table.alter.set_table_description("known"))),
    # The same moment
    "A commit over one of Headwater's": Case(_replace_entry, "over the commit that was there", at_start="fell back"),
}
LATER = "A constraint that a row of the source breaks"
"""Suspended by a row of the source, not by the change itself."""
ASLEEP = ("`RENAME COLUMN`", "`ADD COLUMN`", "`INSERT`", "`vacuum(full=True)`", "A commit over one of Headwater's")
"""Done once more, to tables of their own, while no driver runs."""


QUOTED = '"a note"'
"""A name that Delta has to map."""


def name_of(case: str, *, asleep: bool = False) -> str:
    return f"public.t{list(CASES).index(case)}{'_asleep' if asleep else ''}"


@dataclass(frozen=True)
class Lake(Outcome):
    """`noticed`: seconds until each suspension could be seen; `waited`: what a wait for a suspended table said."""

    noticed: dict[str, float]
    shown: dict[str, str]
    waited: WaitResult


def _tables() -> dict[str, Case]:
    return {name_of(c): case for c, case in CASES.items()} | {name_of(c, asleep=True): CASES[c] for c in ASLEEP}


@pytest.fixture(scope="module")
def lake(shared_database: Database, spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Lake:
    database, tables = shared_database, _tables()
    database.execute(
        *(
            f"create table {name} (id int primary key, n int, {QUOTED if case.mapped else 'note'} text);"
            f"insert into {name} select i, i, 'row ' || i from generate_series(1, 20) i"
            for name, case in tables.items()
        )
    )
    pipeline = loaded_pipeline(tmp_path_factory.mktemp("shop"), database, *tables)
    database.execute(*(f"update {name} set n = n + 100 where id < 4" for name in tables))
    assert set(states_of(catch_up(pipeline)).values()) == {"active"}
    other = spark.newSession()
    other.conf.set("spark.sql.sources.parallelPartitionDiscovery.parallelism", "2")  # else VACUUM has 10,000 tasks
    table_of = {name: Table(other, lake_path_of(pipeline, name)) for name in tables}
    with following(pipeline) as running:
        generation = read_all(pipeline.lake_path())[-1].generation
        until(lambda: _generation(pipeline) > generation or running.done(), "the driver runs")
        harmed: dict[str, datetime] = {}
        for name in map(name_of, CASES):
            tables[name].harm(table_of[name])
            harmed[name] = datetime.now(UTC)
        expected = {name_of(c) for c, case in CASES.items() if case.reason and c != LATER}

        last = time.monotonic()

        def all_noticed() -> bool:
            late = time.monotonic() - last > 2 * NOTICED_WITHIN  # then the tests say which are not
            return running.done() or _suspended(pipeline).keys() >= expected or late

        until(all_noticed, "all is noticed", 3 * NOTICED_WITHIN)
        noticed = {name: (at - harmed[name]).total_seconds() for name, at in _suspended(pipeline).items()}
        shown = {name: f"{t['state']}: {t['reason']}" for name, t in status(pipeline)["tables"].items()}
        waited = wait(pipeline, [TableName.parse(name_of("`RENAME COLUMN`"))], "now", 60.0)
    for name in (name_of(case, asleep=True) for case in ASLEEP):
        tables[name].harm(table_of[name])
    database.execute(*(f"update {name} set n = n + 1000 where id between 3 and 8" for name in tables))
    result = catch_up(pipeline)
    return Lake(database, pipeline, result, dict(registry_of(pipeline).tables), noticed, shown, waited)


def _generation(pipeline: Pipeline) -> int:
    file = read_position_file(pipeline.lake_path())
    return file.generation if file is not None else 0


def _suspended(pipeline: Pipeline) -> dict[str, datetime]:
    """The suspended tables, and since when they are."""
    records = registry_of(pipeline).tables.items()
    return {name: datetime.fromisoformat(r.since) for name, r in records if r.state == "suspended"}


@pytest.mark.parametrize("case", CASES)
def test_what_somebody_does_to_a_table_is_accepted_or_suspends_it(lake: Lake, case: str) -> None:
    for name in (name_of(case), *([name_of(case, asleep=True)] if case in ASLEEP else [])):
        record = lake.records[name]
        if CASES[case].reason:
            assert record.state == "suspended", name
            here = "asleep" in name and CASES[case].at_start
            assert (here or CASES[case].reason) in record.reason
            assert record.remedy.endswith(f"headwater load PIPELINE.yaml --table {name} --again")
        else:
            assert (record.state, record.reason) == ("active", "")
            assert_equal(lake.database, lake.pipeline, name)


def test_it_is_noticed_within_seconds_though_nothing_comes_from_the_source(lake: Lake) -> None:
    expected = {name_of(case) for case in CASES if CASES[case].reason and case != LATER}
    assert expected <= lake.noticed.keys()
    assert {name: s for name, s in lake.noticed.items() if s > NOTICED_WITHIN} == {}
    assert {name for name, said in lake.shown.items() if said.startswith("suspended")} == expected
    assert str(lake.waited.outcome) == "suspended"


def test_nothing_is_applied_to_a_suspended_table(lake: Lake) -> None:
    for case in ("`INSERT`", "`ADD COLUMN`", "`alter.add_columns`"):
        assert not [row for row in lake_rows(lake.pipeline, name_of(case), ["n"]) if row[0] > 1000]


def test_a_row_that_was_not_changed_keeps_its_values_behind_a_change_of_columns(lake: Lake) -> None:
    """Written on, the values of a renamed column would be NULL in every row that changes, with no error anywhere."""
    path = lake_path_of(lake.pipeline, name_of("`RENAME COLUMN`"))
    rows = build_session().read.format("delta").load(path).select("id", "remark").collect()
    assert sorted((row.id, row.remark) for row in rows) == [(i, f"row {i}") for i in range(1, 21)]


def test_a_commit_that_was_overwritten_is_in_no_row_as_ours(lake: Lake, tmp_path: Path) -> None:
    """Between the table's commit and the ledger row that would name it."""
    pipeline, name = lake.pipeline, name_of("`OPTIMIZE`")
    table = Table(build_session(), lake_path_of(pipeline, name))
    with following(pipeline) as running:
        generation = read_all(pipeline.lake_path())[-1].generation
        until(lambda: _generation(pipeline) > generation or running.done(), "the driver runs")
        version = table.rust.version()
        with armed(tmp_path, "replicate.after_all_tables") as hold:
            lake.database.execute(f"update {name} set n = 1 where id = 1")
            hold.reached(running)
            until(lambda: table.rust.version() > version, "the table's commit is there")
            position = DeltaTable(table.path).transaction_version(record_of(pipeline, name).app_id(pipeline.name))
            _replace_entry(table)
        until(lambda: record_of(pipeline, name).state == "suspended" or running.done(), "it is suspended")
    assert "(OPTIMIZE by Apache-Spark) was written by another program over" in record_of(pipeline, name).reason
    rows = [epoch.tables[name] for epoch in read_all(pipeline.lake_path()) if name in epoch.tables]
    assert position not in [row.applied_lsn for row in rows]
    assert rows[-1].state == "suspended"


def test_a_load_lifts_the_suspension(lake: Lake) -> None:
    here = build_session()
    cases = ("`RENAME COLUMN`", "`INSERT`", "`delta.appendOnly`", "`CREATE OR REPLACE TABLE`", "`vacuum(full=True)`")
    others = ("The folder is removed", "The table is dropped and created again", "A commit over one of Headwater's")
    names = [name_of(case) for case in (*cases, *others, LATER)]
    # As their reasons and remedies say: a load could not write against them either.
    unset = "alter table {t} unset tblproperties ('delta.appendOnly')"
    Table(here, lake_path_of(lake.pipeline, name_of("`delta.appendOnly`"))).sql(unset)
    Table(here, lake_path_of(lake.pipeline, name_of(LATER))).sql("alter table {t} drop constraint smaller")
    assert lake.records[name_of(LATER)].remedy.startswith("drop the constraint, then headwater load")
    load(lake.pipeline, [TableName.parse(name) for name in names], True)
    lake.database.execute(*(f"update {name} set n = n + 1 where id between 4 and 9" for name in names))
    states = states_of(catch_up(lake.pipeline))
    assert {states[name] for name in names} == {"active"}
    assert_equal(lake.database, lake.pipeline, *names)


def test_a_reload_of_a_part_lifts_no_suspension_and_a_repair_lifts_it(lake: Lake) -> None:
    name = name_of("`DELETE`")
    done = reload(lake.pipeline, TableName.parse(name), where="id < 7")
    assert (done["tables"][name]["state"], record_of(lake.pipeline, name).state) == ("suspended", "suspended")
    found = verify(lake.pipeline, [TableName.parse(name)], repair=True)
    assert (
        found["tables"][name]["repaired"] == 2
    )  # 7 and 8: the log has changed 3 to 8, the reload has put 3 to 6 right
    assert states_of(catch_up(lake.pipeline))[name] == "active"
    assert_equal(lake.database, lake.pipeline, name)
