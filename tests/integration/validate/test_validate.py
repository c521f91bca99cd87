"""`validate` on a real lake: what fails is named by key, what passed satisfies waits, a part says what all rows say."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import yaml

import headwater
from fixtures.jobs import catch_up, load_tables
from fixtures.lake_waits import wait
from fixtures.loaded import pipeline_in_step
from fixtures.postgres import Database, new_database
from headwater.cli import main
from headwater.delta import storage
from headwater.delta.small_tables import open_table, rows_of
from headwater.demo.postgres import EmbeddedServer
from headwater.errors import EXIT_DONE, EXIT_REFUSED, EXIT_SUSPENDED, Refused
from headwater.lake.cuts import list_pins
from headwater.lake.freshness import Outcome
from headwater.lake.paths import changed_path, validations_path
from headwater.lake.registry import Registry
from headwater.names import TableName
from headwater.pipeline_file.pipeline import Pipeline
from headwater.validate.validate import validate
from headwater.waiting.result import WaitResult

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.spark, pytest.mark.postgres]

ORDERS, PARTED = "public.orders", 'public."Parted Lines"'
SECRET = "do-not-tell"
SOURCE = [
    "create type mood as enum ('glad', 'sad')",
    "create table orders (id bigint primary key, amount numeric(12,2), note text not null, state mood)",
    "insert into orders select i, i, 'note ' || i, 'glad' from generate_series(1, 300) i",
    'create table "Parted Lines" (id int, region text, qty int, "in.stock" int, primary key (id, region))'
    " partition by list (region)",
    "create table parted_eu partition of \"Parted Lines\" for values in ('eu')",
    "create table parted_us partition of \"Parted Lines\" for values in ('us')",
    'insert into "Parted Lines"'
    " select i, case when i % 2 = 0 then 'eu' else 'us' end, i from generate_series(1, 20) i",
]
ORDERS_SUITE = [
    {"type": "expect_column_values_to_be_between", "kwargs": {"column": "amount", "min_value": 0, "max_value": 1000}},
    {
        "type": "expect_column_values_to_match_regex",
        "kwargs": {"column": "note", "regex": "^note"},
        "meta": {"severity": "warning"},
    },
    {"type": "expect_column_mean_to_be_between", "kwargs": {"column": "amount", "min_value": 1, "max_value": 500}},
]


@dataclass
class Shop:
    """A database that is loaded and replicated up to its end; nobody replicates now."""

    database: Database
    pipeline: Pipeline

    def change(self, *statements: str) -> None:
        self.database.execute(*statements)
        catch_up(self.pipeline)

    def validate(self, *tables: str, **options: Any) -> dict[str, Any]:
        return validate(self.pipeline, [TableName.parse(t) for t in tables], **options)

    def wait(self, *tables: str, require: object = "0/1", timeout: float = 0.0) -> WaitResult:
        names = [TableName.parse(t) for t in tables]
        return wait(self.pipeline, names, require, timeout, validated=True)

    def expect(self, table: str, expectations: list[dict[str, Any]], suffix: str = "yaml") -> Path:
        folder = Path(self.pipeline.file).parent / "expectations"
        folder.mkdir(exist_ok=True)
        path = folder / f"{TableName.parse(table).path.replace('/', '.')}.{suffix}"
        suite = {"name": "rules", "expectations": expectations, "meta": {}}
        path.write_text(yaml.safe_dump(suite) if suffix == "yaml" else json.dumps(suite))
        return path

    def rows(self) -> list[dict[str, Any]]:
        table = open_table(validations_path(self.pipeline.lake_path()))
        assert table is not None
        return sorted(rows_of(table), key=lambda row: (row["finished_at"], row["table"], row["suite"]))


def pages_of(found: dict[str, Any]) -> dict[str, str]:
    """The HTML of a validation, by the names below the folder of its overview."""
    folder = os.path.dirname(storage.path_of(found["pages"]))
    names = [info.path for info in storage.files_below(folder, lambda name: True)]
    return {name: storage.read_text(os.path.join(folder, name)) for name in names if name.endswith(".html")}


@pytest.fixture(scope="module")
def shop(postgres: EmbeddedServer, tmp_path_factory: pytest.TempPathFactory, spark: SparkSession) -> Iterator[Shop]:
    with new_database(postgres) as database:
        database.execute(*SOURCE)
        database.allow_publishing()
        pipeline = pipeline_in_step(tmp_path_factory.mktemp("shop"), database, ORDERS, PARTED)
        yield Shop(database, pipeline)


@pytest.fixture(scope="module")
def connections() -> list[Any]:
    """Where this process has connected to since the first test asked."""
    found: list[Any] = []
    sys.addaudithook(lambda event, arguments: found.append(arguments[1]) if event == "socket.connect" else None)
    return found


def test_a_cut_that_meets_everything_passes_stays_pinned_and_satisfies_waits(
    shop: Shop, connections: list[Any]
) -> None:
    assert shop.wait().outcome is Outcome.NOT_VALIDATED
    shop.expect(ORDERS, ORDERS_SUITE)
    begun = len(connections)
    found = shop.validate()
    assert found["success"], found
    assert found["tables"][ORDERS]["suites"] == {
        "basics": {"expectations": 8, "failed": 0, "warnings": 0},
        "rules": {"expectations": 3, "failed": 0, "warnings": 0},
    }
    assert (found["tables"][ORDERS]["rows"], found["tables"][PARTED]["rows"]) == (300, 20)
    assert {name: told["columns_left_out"] for name, told in found["tables"].items()} == {
        ORDERS: [],
        PARTED: ["in.stock"],
    }
    # Great Expectations sends nothing to its makers: only this machine was spoken to, by a path or on the loopback.
    hosts = {address[0] for address in connections[begun:] if isinstance(address, tuple)}
    assert hosts <= {"127.0.0.1", "::1", "localhost"}
    (pin,) = list_pins(shop.pipeline.lake_path())
    assert (pin.id, pin.cut["epoch"]) == (found["pin"]["id"], found["epoch"])
    waited = shop.wait()
    assert waited.outcome is Outcome.SATISFIED
    assert waited.cut is not None
    assert (waited.cut["epoch"], waited.cut["position"]) == (found["epoch"], found["position"])
    overview = storage.read_text(found["pages"])
    assert "every table passed" in overview
    assert "http" not in overview
    pages = {name: text for name, text in pages_of(found).items() if os.path.dirname(name)}
    assert sorted(map(os.path.basename, pages)) == ["public.Parted~20Lines.html", "public.orders.html"]
    for page in pages.values():
        # Before anything that a browser would ask another server for.
        before, policy, _ = page.partition("default-src 'none'; style-src 'unsafe-inline'")
        assert policy
        assert "http" not in before.replace("http-equiv", "")
    assert [(r["table"], r["suite"], r["success"], r["mode"]) for r in shop.rows()] == [
        (PARTED, "basics", True, "full"),
        (ORDERS, "basics", True, "full"),
        (ORDERS, "rules", True, "full"),
    ]
    assert {r["gx_version"] for r in shop.rows()} == {found["great_expectations"]}


def test_what_is_fresh_and_not_validated_satisfies_nobody(shop: Shop) -> None:
    before = shop.rows()[-1]["epoch"]
    with shop.database.connect() as connection:
        connection.execute(f"insert into orders values (400, 1, 'note {SECRET}', 'sad')")
        committed = headwater.commit_position(connection)
    catch_up(shop.pipeline)
    late = shop.wait(require=committed)
    assert (late.outcome, late.exit_status) == (Outcome.NOT_VALIDATED, 3)
    assert "fresh, but not yet validated" in late.verdict.reason
    assert f"of epoch {before} at" in late.verdict.reason
    assert "headwater validate" in late.verdict.remedy
    # What lies below the target before the change is still good for who asks for less.
    assert shop.wait(require="0/1").outcome is Outcome.SATISFIED
    assert wait(shop.pipeline, [], committed, 0.0).outcome is Outcome.SATISFIED


def test_rows_that_fail_are_named_by_key_and_a_part_says_what_the_whole_says(shop: Shop) -> None:
    shop.change(
        f"insert into orders select i, -1, 'note {SECRET}', 'sad' from generate_series(501, 540) i",
        f"insert into orders values (601, 5, '{SECRET}', 'sad')",
        "update orders set amount = 2000 where id in (7, 9)",
        "delete from orders where id = 8",
        "update \"Parted Lines\" set region = 'us' where id = 2",
    )
    in_part, found = shop.validate(incremental=True), shop.validate()
    orders = found["tables"][ORDERS]
    assert [(one["expectation"], one["severity"], one["unexpected"]) for one in orders["failed"]] == [
        ("expect_column_values_to_be_between", "error", 42),
        ("expect_column_values_to_match_regex", "warning", 1),
    ]
    assert (found["success"], orders["success"], found["tables"][PARTED]["success"]) == (False, False, True)
    for run in (in_part, found):
        keys = [one["key"] for one in run["tables"][ORDERS]["keys"]]
        assert len(keys) == 20
        assert all(set(key) == {"id"} and key["id"] in {7, 9, *range(501, 541)} for key in keys)
    for table in (ORDERS, PARTED):
        part = in_part["tables"][table]
        assert part["mode"] == "incremental"
        for name in ("failed", "success", "rows", "suites"):
            assert part[name] == found["tables"][table][name], (table, name)
        read, there = map(int, re.findall(r"^(\d+) of (\d+) files hold", part["note"])[0])
        assert 0 < read < there
    assert not storage.names(changed_path(shop.pipeline.lake_path()))
    first = (
        r"public\.orders: 2 of 12 expectations not met.*expect_column_values_to_be_between of amount \(error\): 42 rows"
    )
    pages = pages_of(found)
    newest = max(name for name in pages if name.endswith("public.orders.html"))
    for head, name in (("<h1>[^<]*1 of 2 tables failed</h1>", "index.html"), ("", newest)):
        assert re.search(rf"<body[^>]*>{head}<p class=failed>{first}, for example id ", pages[name])
    told = [json.dumps(found), json.dumps(shop.rows(), default=str), *pages_of(found).values()]
    assert not [text for text in told if SECRET in text]
    # The cut that failed is nobody's; the other table passed there.
    failed = shop.wait(ORDERS, require=found["position"])
    assert failed.outcome is Outcome.NOT_VALIDATED
    assert f"epoch {found['epoch']}" in failed.verdict.reason
    assert "failed expect_column_values_to_be_between" in failed.verdict.reason
    assert shop.wait(PARTED, require=found["position"]).outcome is Outcome.SATISFIED


def test_a_warning_fails_nothing_and_what_failed_is_asked_of_every_row_again(shop: Shop) -> None:
    shop.change("delete from orders where id between 501 and 540", "update orders set amount = 7 where id in (7, 9)")
    found = shop.validate(incremental=True)
    orders = found["tables"][ORDERS]
    assert (found["success"], orders["success"], orders["mode"]) == (True, True, "incremental")
    assert [(one["expectation"], one["severity"]) for one in orders["failed"]] == [
        ("expect_column_values_to_match_regex", "warning")
    ]
    # This row has not changed since the last validation, which it did not pass.
    assert [one["key"] for one in orders["keys"]] == [{"id": 601}]
    rules = [row for row in shop.rows() if row["validation"] == found["validation"] and row["suite"] == "rules"]
    assert [(row["severity"], row["failed"], row["warnings"]) for row in rules] == [("warning", 0, 1)]
    assert shop.wait(require=found["position"]).outcome is Outcome.SATISFIED
    owners = [pin.owner.split()[0] for pin in list_pins(shop.pipeline.lake_path())]
    assert (owners.count("validated"), owners.count("validating")) == (1, 0)


def test_a_suite_that_cannot_be_used_is_one_refusal_before_anything_runs(shop: Shop) -> None:
    before = len(shop.rows())
    good = shop.expect(ORDERS, ORDERS_SUITE).read_text()
    bad = shop.expect(ORDERS, [*ORDERS_SUITE, {"type": "expect_magic", "kwargs": {}}, {"type": 3, "kwargs": {}}])
    stray = bad.with_name("public.nothing.yaml")
    try:
        stray.write_text("expectations: []")
        with pytest.raises(Refused) as refused:
            shop.validate()
        assert refused.value.code == "bad_suite"
        assert f"{bad}: expectations[4].type" in refused.value.message
        assert f"{stray}: no table of the pipeline" in refused.value.message
        stray.unlink()
        shop.expect(ORDERS, [{"type": "expect_magic"}, {"type": "expect_column_values_to_be_between", "kwargs": {}}])
        with pytest.raises(Refused) as refused:
            shop.validate()
        assert f"{bad}: expectations[0]: Great Expectations knows no expect_magic" in refused.value.message
        assert f"{bad}: expectations[1]" in refused.value.message
    finally:
        stray.unlink(missing_ok=True)
        bad.write_text(good)
    assert len(shop.rows()) == before


def test_a_cut_from_a_wait_is_validated_as_it_is_and_a_foreign_one_refused(
    shop: Shop, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    cut = wait(shop.pipeline, [TableName.parse(PARTED)], "0/1", 0.0).to_json()
    shop.change("insert into \"Parted Lines\" values (100, 'eu', 1)")
    file = tmp_path / "cut.json"
    file.write_text(json.dumps(cut))
    assert (
        main(["validate", shop.pipeline.file, "--cut", str(file), "--json", "--pages", str(tmp_path / "p")])
        == EXIT_DONE
    )
    found = json.loads(capsys.readouterr().out)
    assert (found["epoch"], found["position"]) == (cut["epoch"], cut["position"])
    assert (list(found["tables"]), found["tables"][PARTED]["rows"]) == ([PARTED], 20)
    assert (tmp_path / "p" / "index.html").exists()
    # What is validated of a part would be taken for the whole.
    part = {**cut, "tables": {PARTED: {**cut["tables"][PARTED], "partitions": {"public.eu": [1]}}}}
    cut["tables"][PARTED]["version"] += 1
    for foreign in (cut, part):
        file.write_text(json.dumps(foreign))
        assert main(["validate", shop.pipeline.file, "--cut", str(file), "--json"]) == EXIT_REFUSED
        assert json.loads(capsys.readouterr().out)["error"]["code"] == "bad_cut"


def test_a_table_that_was_loaded_anew_must_be_validated_anew_and_a_suspended_one_is_left_out(
    shop: Shop, capsys: pytest.CaptureFixture[str]
) -> None:
    old = shop.wait(PARTED)
    assert (old.outcome, old.cut is not None) == (Outcome.SATISFIED, True)
    load_tables(shop.pipeline, PARTED, again=True)
    catch_up(shop.pipeline)
    with pytest.raises(Refused, match="it was loaded again since epoch"):
        shop.validate(cut=old.cut)
    late = shop.wait(PARTED)
    assert late.outcome is Outcome.NOT_VALIDATED
    assert "was loaded again since" in late.verdict.reason
    assert "loaded again" in shop.validate(PARTED, incremental=True)["tables"][PARTED]["note"]
    assert shop.wait(PARTED).outcome is Outcome.SATISFIED
    registry = Registry.open(shop.pipeline.lake_path(), "shop")
    assert registry is not None
    registry.change(ORDERS, lambda record: record.entered("suspended", "for a test"))
    assert main(["validate", shop.pipeline.file, "--json"]) == EXIT_SUSPENDED
    found = json.loads(capsys.readouterr().out)
    assert found["tables"][ORDERS] | {"state": "suspended", "success": None} == found["tables"][ORDERS]
    assert found["tables"][PARTED]["success"]
