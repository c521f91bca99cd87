"""What Airflow's OpenLineage provider, the real one, gets from the operators and puts into its events."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from fixtures.lakes import HandLake
from headwater.hidden import Hidden
from headwater.position import Position
from headwater.schema import Column, TableSchema, ValueType

if TYPE_CHECKING:
    from headwater_airflow.operators.spark import HeadwaterSparkOperator

PASSWORD, MASK = "not-to-be-seen", "nor-this"
SOURCE = "postgres://db.example:5433"
COLUMNS = (
    Column("id", 1, 20, -1, ValueType("int8", "bigint"), not_null=True),
    Column("email", 2, 25, -1, ValueType("text", "string"), hidden=Hidden("mask", MASK)),
)
ORDERS = TableSchema(10, "public", "orders", COLUMNS, ("id",), soft_delete=True)

pytestmark = pytest.mark.usefixtures("airflow_home")


@pytest.fixture
def pipeline(tmp_path: Path) -> str:
    """A pipeline of two tables, of which the lake has one, and another that it is rid of."""
    lake = HandLake(tmp_path / "lake", Position("7", 1, 100), ["public.orders", "public.gone"])
    lake.registry.write(replace(lake.registry.record("public.orders"), schemas=((100, ORDERS),)))
    lake.enter("public.gone", "removed")
    file = tmp_path / "shop.yaml"
    file.write_text(
        f"pipeline: shop\nsource: {{connection: 'postgresql://someone:{PASSWORD}@db.example:5433/shop'}}\n"
        f"lake: {{root: 'file://{tmp_path}/lake'}}\ntables: [public.orders, 'public.\"Order Lines\"']\n"
    )
    return str(file)


def told(operator: HeadwaterSparkOperator, state: str = "running", result: dict[str, Any] | None = None) -> Any:
    """Inputs and outputs as JSON, by way of the provider; `result`: what the job has printed."""
    from airflow.providers.openlineage.extractors.manager import ExtractorManager
    from airflow.utils.state import TaskInstanceState
    from openlineage.client.serde import Serde

    from headwater_airflow.operators.submission import SparkSubmission

    if result is not None:
        operator._hook = SparkSubmission()
        operator._hook.result = result
    run: Any = SimpleNamespace(run_id="one")
    found = ExtractorManager().extract_metadata(
        run, operator, TaskInstanceState(state), task_instance=SimpleNamespace()
    )
    sides = {side: [Serde.to_json(one) for one in getattr(found, side)] for side in ("inputs", "outputs")}
    assert not any(secret in text for side in sides.values() for text in side for secret in (PASSWORD, MASK))
    return {side: [json.loads(text) for text in texts] for side, texts in sides.items()}


def names(datasets: list[dict[str, Any]]) -> list[tuple[str, str]]:
    return [(dataset["namespace"], dataset["name"]) for dataset in datasets]


@pytest.mark.parametrize(
    ("place", "expected"),
    [
        ("/lake/public/orders", ("file", "/lake/public/orders")),
        ("s3://analytics/shop/public/orders", ("s3://analytics", "shop/public/orders")),
        ("gs://analytics/shop/public/orders", ("gs://analytics", "shop/public/orders")),
        (
            "abfss://lake@account.dfs.core.windows.net/shop/public/orders",
            ("abfss://lake@account.dfs.core.windows.net", "shop/public/orders"),
        ),
    ],
)
def test_a_table_is_named_by_where_it_lies(place: str, expected: tuple[str, str]) -> None:
    from headwater_airflow.lineage import _delta_table

    named = _delta_table(place)
    assert (named.namespace, named.name) == expected


def test_tables_of_the_source_become_delta_tables_column_by_column(pipeline: str, tmp_path: Path) -> None:
    from headwater_airflow.operators.spark import LoadOperator, ReloadOperator, ReplicateOperator

    for operator in (ReplicateOperator(task_id="all", pipeline=pipeline), LoadOperator(task_id="l", pipeline=pipeline)):
        found = told(operator)
        assert names(found["inputs"]) == [(SOURCE, "shop.public.Order Lines"), (SOURCE, "shop.public.orders")]
        of_lines, of_orders = found["outputs"]
        assert names([of_lines]) == [("file", f"{tmp_path}/lake/public/Order~20Lines")]
        assert not of_lines["facets"], "nothing is known of it before its load"
        assert names([of_orders]) == [("file", f"{tmp_path}/lake/public/orders")]
        columns = [(field["name"], field["type"]) for field in of_orders["facets"]["schema"]["fields"]]
        assert columns[:3] == [("id", "bigint"), ("email", "string"), ("_hw_deleted", "boolean")]
        origins = of_orders["facets"]["columnLineage"]["fields"]
        (email,) = origins["email"]["inputFields"]
        assert (email["namespace"], email["name"], email["field"]) == (SOURCE, "shop.public.orders", "email")
        hidden = {name: field["inputFields"][0]["transformations"][0]["masking"] for name, field in origins.items()}
        assert hidden == {"id": False, "email": True}
    one = told(ReloadOperator(task_id="one", pipeline=pipeline, table="public.orders"), "success")
    assert names(one["inputs"]) == [(SOURCE, "shop.public.orders")]


def test_a_rebuild_tells_of_the_side_that_it_has_read(pipeline: str, tmp_path: Path) -> None:
    from headwater_airflow.operators.spark import RebuildOperator

    def read_from(where: str) -> Any:
        operator = RebuildOperator(task_id="rebuild", pipeline=pipeline, table="public.orders")
        assert not told(operator)["outputs"], "only its end tells"
        return told(operator, "success", {"tables": {"public.orders": {"read_from": where}}})

    here = ("file", f"{tmp_path}/lake/public/orders")
    assert [names(read_from("lake")[side]) for side in ("inputs", "outputs")] == [[here], [here]]
    assert names(read_from("source")["inputs"]) == [(SOURCE, "shop.public.orders")]
    assert not read_from("")["outputs"]


def test_what_reads_the_lake_tells_the_version_and_a_validation_whether_its_suites_were_met(
    pipeline: str, tmp_path: Path
) -> None:
    from headwater_airflow.operators.spark import SparkOnCutOperator, ValidateOperator, VerifyOperator

    here = ("file", f"{tmp_path}/lake/public/orders")
    tables = {
        "public.orders": {"path": f"file://{here[1]}", "version": 4, "applied_lsn": "0/1", "state": "in step"},
        "public.new": {"path": f"file://{tmp_path}/lake/public/new", "version": None, "state": "absent"},
    }
    found = told(SparkOnCutOperator(task_id="report", application="report.py", cut={"tables": tables}))
    assert names(found["inputs"]) == [here]
    assert found["inputs"][0]["facets"]["version"]["datasetVersion"] == "4"
    instead = {"tables": {"public.orders": {"version": None}}, "fallback": {"pipeline_file": pipeline}}
    found = told(SparkOnCutOperator(task_id="instead", application="report.py", cut=instead))
    assert names(found["inputs"]) == [(SOURCE, "shop.public.orders")]

    operator = ValidateOperator(task_id="validate", pipeline=pipeline, tables=["public.orders"])
    suites = {"basics": {"expectations": 2, "failed": 1, "warnings": 0}}
    found = told(operator, "failed", {"tables": {"public.orders": {"version": 5, "suites": suites}}})
    assert names(found["inputs"]) == [here]
    assert found["inputs"][0]["facets"]["version"]["datasetVersion"] == "5"
    (assertion,) = found["inputs"][0]["inputFacets"]["dataQualityAssertions"]["assertions"]
    assert (assertion["assertion"], assertion["success"]) == ("suite basics", False)

    found = told(VerifyOperator(task_id="verify", pipeline=pipeline, tables=["public.orders"]))
    assert names(found["inputs"]) == [(SOURCE, "shop.public.orders"), here]


def test_a_source_behind_an_airflow_connection_is_named_by_its_host(
    pipeline: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headwater_airflow.operators.spark import ReplicateOperator

    file = Path(pipeline)
    url = f"postgresql://someone:{PASSWORD}@db.example:5433/shop"
    file.write_text(file.read_text().replace(url, "airflow: shop_db"))
    monkeypatch.setenv("AIRFLOW_CONN_SHOP_DB", f"postgresql://someone:{PASSWORD}@[::1],other/shop")
    found = told(ReplicateOperator(task_id="all", pipeline=pipeline))
    assert names(found["inputs"])[1] == ("postgres://::1:5432", "shop.public.orders")


def test_what_cannot_be_told_is_told_by_nobody_and_fails_nothing(pipeline: str) -> None:
    from headwater_airflow.operators.spark import MaintainOperator, ReplicateOperator

    nothing: dict[str, Any] = {"inputs": [], "outputs": []}
    assert told(MaintainOperator(task_id="maintain", pipeline=pipeline)) == nothing, "it changes no row"
    Path(pipeline).unlink()
    assert told(ReplicateOperator(task_id="all", pipeline=pipeline)) == nothing


def test_a_job_knows_its_task_and_no_command_line_the_key_of_the_transport(
    pipeline: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    program = """
import sys
from datetime import UTC, datetime
from types import SimpleNamespace
from headwater_airflow.operators.spark import LoadOperator
from headwater_airflow.operators.submission import SparkSubmission

def submit(self, application="", **arguments):
    print(*self._build_spark_submit_command(application), sep="\\n")

SparkSubmission.submit = submit
both = {"openlineage_inject_parent_job_info": True, "openlineage_inject_transport_info": True}
run = SimpleNamespace(logical_date=datetime.now(UTC), run_after=None, clear_number=0, conf={})
task = SimpleNamespace(dag_id="shop.load", task_id="load", map_index=-1, try_number=1)
task.get_template_context, task.xcom_push = lambda: {"dag_run": run}, lambda **xcom: None
LoadOperator(task_id="load", pipeline=sys.argv[1], **both).execute({"ti": task})
"""
    key = "a-key-not-to-be-seen"
    transport = {"type": "http", "url": "http://127.0.0.1:1", "auth": {"type": "api_key", "apiKey": key}}
    monkeypatch.setenv("AIRFLOW__OPENLINEAGE__TRANSPORT", json.dumps(transport))
    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", '{"conn_type": "spark", "host": "local[1]"}')
    ran = subprocess.run([sys.executable, "-c", program, pipeline], capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr
    assert "spark.openlineage.parentJobName=shop.load.load" in ran.stdout.splitlines()
    assert key not in ran.stdout


@pytest.mark.parametrize("put_back", [0, 1])
def test_a_slice_that_goes_on_after_a_pause_does_not_tell_openlineage_that_it_starts_once_more(
    pipeline: str, monkeypatch: pytest.MonkeyPatch, put_back: int
) -> None:
    from airflow.providers.openlineage.plugins.listener import OpenLineageListener
    from airflow.utils.state import TaskInstanceState

    from headwater_airflow.operators.spark import ReplicateOperator

    starts: list[Any] = []
    monkeypatch.setattr(OpenLineageListener, "_on_task_instance_running", lambda self, *told: starts.append(told))
    task = ReplicateOperator(task_id="replicate", pipeline=pipeline, go_on_after_pause=True)
    context = {"dag_run": None, "dag": None, "task": task, "task_reschedule_count": put_back}
    instance: Any = SimpleNamespace(get_template_context=lambda: context, start_date=None)
    OpenLineageListener().on_task_instance_running(TaskInstanceState.QUEUED, instance)
    assert len(starts) == (0 if put_back else 1)


def test_operators_are_made_where_openlineage_is_not_installed(airflow_home: Path) -> None:
    program = """
import sys

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] == "openlineage":
            raise ImportError(name)

sys.meta_path.insert(0, Blocker())
from headwater_airflow.operators.spark import ReplicateOperator
print(ReplicateOperator(task_id="replicate", pipeline="shop.yaml").task_id)
"""
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert ran.stdout.splitlines()[-1] == "replicate"
