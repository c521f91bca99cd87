"""The Airflow side without a running Airflow: the DAGs made from pipeline files, and what parsing imports."""

from __future__ import annotations

import importlib
import json
import os
import re
import runpy
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import jsonschema
import pytest

from headwater.errors import BadConfiguration

if TYPE_CHECKING:
    from airflow.sdk import DAG

ROOT = Path(__file__).resolve().parents[3]
PASSWORD = "not-to-be-seen"
ALL_DAGS = {f"shop.{job}" for job in ("load", "replicate", "resume", "reload", "verify", "validate", "maintain")}
SOURCE = f"postgresql://someone:{PASSWORD}@127.0.0.1:1/nowhere"

BLOCKED_IMPORTS = """
import importlib, pkgutil, runpy, sys
heavy = {"pyspark", "pandas", "pyarrow", "great_expectations", "deltalake", "numpy", "delta", "py4j"}

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in heavy:
            raise ImportError(f"{name} is imported while Airflow parses")

sys.meta_path.insert(0, Blocker())
import headwater_airflow
for module in pkgutil.walk_packages(headwater_airflow.__path__, "headwater_airflow."):
    importlib.import_module(module.name)
found = set()
for file in sys.argv[1:]:
    found |= {name for name in runpy.run_path(file) if "." in name or name == "__name__"}
print(sorted(found - {"__name__"}))
"""


pytestmark = pytest.mark.usefixtures("airflow_home")


def write_pipeline(folder: Path, name: str, file: str | None = None) -> Path:
    path = folder / f"{file or name}.yaml"
    path.write_text(
        f"pipeline: {name}\nsource: {{connection: '{SOURCE}'}}\nlake: {{root: 'file://{folder}/lake'}}\n"
        "tables: [public.a]\n"
    )
    return path


def headwater_dags(files: str | Path, **options: float | str) -> dict[str, DAG]:
    from headwater_airflow import dag_factory

    return dag_factory.headwater_dags(files, **options)  # type: ignore[arg-type]


def _arguments(dag: DAG) -> list[str]:
    task: Any = dag.get_task("replicate")
    return list(task.application_args)


def serialized(dag: DAG) -> str:
    from airflow.serialization.serialized_objects import DagSerialization

    return json.dumps(DagSerialization.to_dict(dag))


def test_a_pipeline_is_loaded_on_request_and_replicated_continuously(tmp_path: Path) -> None:
    dags = headwater_dags(write_pipeline(tmp_path, "shop"), slice_seconds=90)
    assert set(dags) == ALL_DAGS
    load, replicate = dags["shop.load"], dags["shop.replicate"]
    assert load.schedule is None
    assert load.max_active_runs == 1
    assert replicate.max_consecutive_failed_dag_runs > 0
    assert replicate.catchup is False
    arguments = _arguments(replicate)
    assert arguments[arguments.index("--max-seconds") + 1] == "90"
    assert arguments[arguments.index("--overtime") + 1] == "3600"
    long = _arguments(headwater_dags(write_pipeline(tmp_path, "shop"), slice_seconds=7200)["shop.replicate"])
    assert long[long.index("--overtime") + 1] == "7200"
    month = _arguments(headwater_dags(write_pipeline(tmp_path, "shop"), slice_seconds=2592000)["shop.replicate"])
    assert [month[month.index(name) + 1] for name in ("--max-seconds", "--overtime")] == ["2592000", "2592000"]
    # The next one begins when this has ended.
    alone = headwater_dags(write_pipeline(tmp_path, "shop"), slice_seconds=90, warm_up_seconds=0)["shop.replicate"]
    assert "--overtime" not in _arguments(alone)


@pytest.mark.parametrize(("warm_up", "period"), [(30.0, 60.0), (60.0, 45.0)])
def test_a_slice_begins_while_the_one_before_still_runs_and_takes_over(
    tmp_path: Path, warm_up: float, period: float
) -> None:
    from headwater_airflow.timetable import OverlappingSlices

    dags = headwater_dags(write_pipeline(tmp_path, "shop"), slice_seconds=90, warm_up_seconds=warm_up)
    replicate = dags["shop.replicate"]
    assert replicate.timetable == OverlappingSlices(period)
    assert replicate.max_active_runs == 2
    assert "--take-over" in _arguments(replicate)


def test_without_a_warm_up_slices_follow_each_other_one_at_a_time(tmp_path: Path) -> None:
    replicate = headwater_dags(write_pipeline(tmp_path, "shop"), warm_up_seconds=0)["shop.replicate"]
    assert type(replicate.timetable).__name__ == "ContinuousTimetable"
    assert replicate.max_active_runs == 1
    assert "--take-over" not in _arguments(replicate)


def test_a_pipeline_is_maintained_at_its_own_times(tmp_path: Path) -> None:
    file = write_pipeline(tmp_path, "shop")
    maintain: Any = headwater_dags(file)["shop.maintain"]
    assert maintain.schedule == "@daily"
    assert maintain.max_active_runs == 1
    arguments = maintain.get_task("maintain").application_args
    assert arguments == [str(file), "--json"]
    hourly: Any = headwater_dags(file, maintain_schedule="0 * * * *")["shop.maintain"]
    assert hourly.schedule == "0 * * * *"


def test_a_pipeline_is_validated_when_somebody_asks_or_at_its_own_times(tmp_path: Path) -> None:
    file = write_pipeline(tmp_path, "shop")
    validate: Any = headwater_dags(file)["shop.validate"]
    assert (validate.schedule, validate.max_active_runs, validate.is_paused_upon_creation) == (None, 1, False)
    task = validate.get_task("validate")
    assert task.application_args == [str(file), "--json"]
    assert Path(task.application).name == "headwater_validate.py"
    daily: Any = headwater_dags(file, validate_schedule="@daily", validate_incremental=True)["shop.validate"]
    assert (daily.schedule, daily.is_paused_upon_creation) == ("@daily", True)
    assert daily.get_task("validate").application_args == [str(file), "--json", "--incremental"]
    assert PASSWORD not in serialized(validate)


def test_a_validation_gets_the_cut_that_a_sensor_found_in_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from airflow.sdk.exceptions import AirflowFailException

    from headwater_airflow.operators.spark import HeadwaterSparkOperator, ValidateOperator

    seen: list[Any] = []

    def submitted(self: HeadwaterSparkOperator, context: Any) -> None:
        arguments = self.application_args or []
        seen.append((arguments[:-1], json.loads(Path(arguments[-1]).read_text())))

    monkeypatch.setattr(HeadwaterSparkOperator, "execute", submitted)
    cut = {"pipeline": "shop", "epoch": 3, "tables": {}}
    task = ValidateOperator(task_id="v", pipeline="shop.yaml", tables=["public.a"], cut=cut, pages="/docs")
    task.execute({})
    expected = ["shop.yaml", "--json", "--table", "public.a", "--pages", "/docs", "--cut"]
    assert seen == [(expected, cut)]
    assert {"cut", "pipeline", "application_args"} <= set(task.template_fields)
    with pytest.raises(AirflowFailException, match="no cut to read"):
        ValidateOperator(task_id="w", pipeline="shop.yaml", cut="None").execute({})


def test_replication_waits_paused_for_the_first_load(tmp_path: Path) -> None:
    dags = headwater_dags(write_pipeline(tmp_path, "shop"))
    assert dags["shop.replicate"].is_paused_upon_creation is True
    assert dags["shop.load"].is_paused_upon_creation is False


def test_replication_begins_behind_a_load_even_one_that_suspended_a_table(tmp_path: Path) -> None:
    load = headwater_dags(write_pipeline(tmp_path, "shop"))["shop.load"]
    begin = load.get_task("begin_replication")
    assert begin.upstream_task_ids == {"load"}
    assert begin.is_teardown


class _Ran(NamedTuple):
    task_id: str
    state: str


@pytest.mark.parametrize(
    ("load", "begin", "run_fails"),
    [
        ("success", "success", False),
        ("failed", "success", True),
        ("success", "failed", True),
        ("failed", "failed", True),
    ],
)
def test_a_run_of_load_fails_with_its_load_and_where_replication_was_not_begun(
    tmp_path: Path, load: str, begin: str, run_fails: bool
) -> None:
    from airflow.models.dagrun import DagRun
    from airflow.utils.state import State

    dag: Any = headwater_dags(write_pipeline(tmp_path, "shop"))["shop.load"]
    states = {"load": load, "begin_replication": begin, "loaded": "upstream_failed" if load == "failed" else load}
    assert states.keys() == set(dag.task_ids)
    # Airflow's own rule for which tasks a run's outcome comes from.
    rule: Any = DagRun._tis_for_dagrun_state
    tasks = [_Ran(name, state) for name, state in states.items()]
    decisive = rule(None, dag=dag, tis=tasks)
    assert any(task.state in State.failed_states for task in decisive) is run_fails


def test_a_reload_is_asked_for_by_table_and_part(tmp_path: Path) -> None:
    from headwater_airflow.operators import spark

    reload = headwater_dags(write_pipeline(tmp_path, "shop"))["shop.reload"]
    assert not reload.render_template_as_native_obj, "other templates would be read as Python's objects, too"
    assert reload.max_active_runs > 1
    assert set(reload.params) == {"table", "partitions", "where", "changed"}
    task: Any = reload.get_task("reload")
    assert {"table", "partitions", "where", "changed"} <= set(task.template_fields)
    filled = {"table": "public.a", "partitions": ["a_1", 'A "b"'], "where": None, "changed": False}
    context: Any = {"params": filled}
    task.render_template_fields(context, reload.get_template_env())
    assert (task.table, task.where, task.changed) == ("public.a", "", "")
    assert spark._names(task.partitions) == ["a_1", 'A "b"']


def test_a_backfill_puts_its_interval_into_what_is_reloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from airflow.sdk.exceptions import AirflowFailException

    from headwater_airflow.operators import spark

    monkeypatch.setattr(spark.HeadwaterSparkOperator, "execute", lambda self, context: {})

    def arguments(run_type: str, **chosen: Any) -> list[Any]:
        task = spark.ReloadOperator(task_id="r", pipeline="shop.yaml", table="public.orders", **chosen)
        bounds = {
            "data_interval_start": datetime(2026, 3, 1, tzinfo=UTC),
            "data_interval_end": datetime(2026, 4, 1, tzinfo=UTC),
        }
        context: Any = {"dag_run": SimpleNamespace(run_type=run_type), **bounds}
        task.execute(context)
        return list(task.application_args or ())[4:]

    day = "day >= '{start:%Y-%m-%d}' and at < '{end}'"
    assert arguments("backfill", where=day) == ["--where=day >= '2026-03-01' and at < '2026-04-01T00:00:00+00:00'"]
    assert arguments("backfill", partitions=["o_{start:%Y_%m}"]) == ["--partition", "o_2026_03"]
    assert arguments("manual", where="note = '{start}'") == ["--where=note = '{start}'"]
    with pytest.raises(AirflowFailException, match="would reload the same"):
        arguments("backfill", where="id < 5")


@pytest.mark.parametrize(
    ("job", "chosen", "expected"),
    [
        ("load", {"tables": None, "again": False}, []),
        ("load", {"tables": ["public.a", ""], "again": True}, ["--table", "public.a", "--again"]),
        ("load", {"tables": ['public."A b"'], "again": False}, ["--table", 'public."A b"']),
        ("verify", {"tables": ["public.a"], "repair": False}, ["--table", "public.a"]),
        ("verify", {"tables": [], "repair": True}, ["--repair"]),
        ("reload", {"table": None, "partitions": None, "where": None, "changed": True}, ["--changed"]),
        ("reload", {"table": '"A b"', "partitions": [], "where": "", "changed": False}, ["--table", '"A b"']),
    ],
)
def test_what_a_form_leaves_empty_is_asked_of_all_tables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, job: str, chosen: dict[str, Any], expected: list[str]
) -> None:
    from headwater_airflow.operators import spark

    monkeypatch.setattr(spark.HeadwaterSparkOperator, "execute", lambda self, context: {})
    dag = headwater_dags(write_pipeline(tmp_path, "shop"))[f"shop.{job}"]
    task: Any = dag.get_task(job)
    context: Any = {"params": chosen}
    task.render_template_fields(context, dag.get_template_env())
    task.execute(context)
    assert task.application_args == [task.pipeline, "--json", *expected]


def test_nothing_is_loaded_again_that_nobody_names(monkeypatch: pytest.MonkeyPatch) -> None:
    from airflow.sdk.exceptions import AirflowFailException

    from headwater_airflow.operators.spark import LoadOperator

    with pytest.raises(AirflowFailException, match="name the tables"):
        LoadOperator(task_id="load", pipeline="shop.yaml", again=True).execute({})


def test_every_field_of_a_form_may_stay_empty(tmp_path: Path) -> None:
    for dag in headwater_dags(write_pipeline(tmp_path, "shop")).values():
        for name in dag.params:
            param = dag.params.get_param(name)
            assert param.schema["type"] == "boolean" or "null" in param.schema["type"], f"{dag.dag_id}: {name}"
            assert param.value in (None, False, [])


def test_a_faulty_file_among_others_is_left_out_and_reported_elsewhere(tmp_path: Path) -> None:
    from headwater_airflow.dag_factory import report_faults

    write_pipeline(tmp_path, "shop")
    report_faults(tmp_path / "*.yaml")
    (tmp_path / "warehouse.yaml").write_text("pipeline: warehouse\nsauce: {}\n")
    assert set(headwater_dags(tmp_path / "*.yaml")) == ALL_DAGS
    with pytest.raises(BadConfiguration, match=r"(?s)warehouse\.yaml.*sauce"):
        report_faults(tmp_path / "*.yaml")


def test_a_faulty_file_that_is_named_raises(tmp_path: Path) -> None:
    faulty = tmp_path / "warehouse.yaml"
    faulty.write_text("pipeline: warehouse\nsauce: {}\n")
    with pytest.raises(BadConfiguration, match="sauce"):
        headwater_dags(faulty)


def test_of_two_files_with_the_same_pipeline_name_the_second_is_faulty(tmp_path: Path) -> None:
    from headwater_airflow.dag_factory import report_faults

    first = write_pipeline(tmp_path, "shop", "one")
    second = write_pipeline(tmp_path, "shop", "two")
    dags = headwater_dags(tmp_path / "*.yaml")
    assert set(dags) == ALL_DAGS
    assert str(first) in str(dags["shop.load"].doc_md)
    with pytest.raises(BadConfiguration, match=f"{second}.*{first} has the same pipeline name"):
        report_faults(tmp_path / "*.yaml")


@pytest.mark.parametrize("copy", ["shop (copy)", "shop-old", "a"])
def test_a_copy_of_a_pipeline_file_does_not_take_the_pipeline_over(tmp_path: Path, copy: str) -> None:
    """It often sorts before the file. Nor does it where the file is faulty for a moment."""
    from headwater_airflow.pipeline_files import read_pipelines

    file, other = write_pipeline(tmp_path, "shop"), tmp_path / f"{copy}.yaml"
    other.write_text(file.read_text())
    (pipeline,), (fault,) = read_pipelines(str(tmp_path / "*.yaml"))
    assert (pipeline.file, fault.where) == (str(file), str(other))
    assert f"{file} has the same pipeline name" in str(fault)
    file.write_text("pipeline: [shop")
    used, faults = read_pipelines(str(tmp_path / "*.yaml"))
    assert not used
    assert f"{file} is named after the pipeline shop, and is faulty" in str(faults[-1])
    # A faulty file of the same name in another folder takes nothing from this one.
    (tmp_path / "elsewhere").mkdir()
    elsewhere = write_pipeline(tmp_path / "elsewhere", "shop")
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / "shop.yaml").write_text("pipeline: [shop")
    (pipeline,), _ = read_pipelines(str(tmp_path / "*" / "shop.yaml"))
    assert pipeline.file == str(elsewhere)


def test_the_documentation_of_a_dag_names_lake_and_tables_of_the_file(tmp_path: Path) -> None:
    file = write_pipeline(tmp_path, "shop")
    for dag in headwater_dags(file).values():
        assert f"Lake: `file://{tmp_path}/lake`" in str(dag.doc_md)
        assert "- `public.a`" in str(dag.doc_md)
    more = "".join(f", public.t{number}" for number in range(60))
    file.write_text(file.read_text().replace("[public.a]", f"[public.a{more}]"))
    doc = str(headwater_dags(file)["shop.load"].doc_md)
    assert "- `public.t48`\n- and 11 more lines of the file" in doc


def test_a_stored_dag_holds_no_secret(tmp_path: Path) -> None:
    for dag in headwater_dags(write_pipeline(tmp_path, "shop")).values():
        assert PASSWORD not in serialized(dag)


def test_the_provider_info_is_what_airflow_asks_for_and_names_every_module_with_a_trigger_or_sensor() -> None:
    import airflow

    from headwater_airflow.plugin import HeadwaterPlugin
    from headwater_airflow.provider_info import get_provider_info

    info = get_provider_info()
    schema = json.loads((Path(airflow.__file__).parent / "provider_info.schema.json").read_text())
    jsonschema.validate(info, schema)
    assert set(info) <= set(schema["properties"])
    assert info["package-name"] == "headwater"
    for kind in ("operators", "sensors", "triggers", "hooks"):
        named = {module for entry in info[kind] for module in entry["python-modules"]}
        for module in named:
            importlib.import_module(module)
        if kind in ("sensors", "triggers"):
            files = (ROOT / "plugins" / "headwater_airflow" / kind).glob("*.py")
            classes = re.compile(rf"^class \w+{kind.removesuffix('s').capitalize()}\(", re.MULTILINE)
            assert named == {
                f"headwater_airflow.{kind}.{file.stem}" for file in files if classes.search(file.read_text())
            }
    assert "plugins" not in info  # its entry point registers the plugin: once more is an import error in Airflow
    assert HeadwaterPlugin.name == "headwater"


def test_airflow_parses_plugin_and_dags_without_any_engine(tmp_path: Path) -> None:
    write_pipeline(tmp_path, "shop")
    environment = {
        **os.environ,
        "HEADWATER_PIPELINES": str(tmp_path),
        "PYTHONPATH": os.pathsep.join([str(ROOT / "spark_jobs"), str(ROOT / "plugins")]),
    }
    files = [str(file) for file in sorted((ROOT / "dags").glob("*.py"))]
    done = subprocess.run(
        [sys.executable, "-c", BLOCKED_IMPORTS, *files], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert "shop.load" in done.stdout


def test_airflows_configuration_names_the_folder_of_pipelines_unless_the_environment_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headwater_airflow.page.watches import Watches

    write_pipeline(tmp_path, "shop")
    monkeypatch.delenv("HEADWATER_PIPELINES", raising=False)
    assert Watches().folder is None
    monkeypatch.setenv("AIRFLOW__HEADWATER__PIPELINES", str(tmp_path))
    monkeypatch.setenv("AIRFLOW__HEADWATER__SLICE_SECONDS", "90")
    found = runpy.run_path(str(ROOT / "dags" / "headwater_pipelines.py"))
    arguments = _arguments(found["shop.replicate"])
    assert arguments[arguments.index("--max-seconds") + 1] == "90"
    assert Watches().folder == str(tmp_path)
    monkeypatch.setenv("HEADWATER_PIPELINES", "/elsewhere")
    assert Watches().folder == "/elsewhere"


def test_a_checkout_alone_is_enough_for_the_plugins_folder(tmp_path: Path) -> None:
    """Airflow puts the plugins folder on the path, and nothing else: the engine beside it is found from there."""
    code = "import headwater_airflow, headwater.errors; print(headwater.errors.__file__)"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "PYTHONPATH": str(ROOT / "plugins")},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "headwater" in done.stdout
