"""The gallery: each example in dags/examples runs as it is, on a lake that a driver follows, and gives what the source
has. One process runs all of them: Airflow's start is what costs."""

from __future__ import annotations

import ast
import json
import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from email import message_from_bytes
from email.policy import default
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import duckdb
import jinja2
import pyarrow as pa
import pytest
import yaml
from aiosmtpd.controller import Controller
from deltalake import DeltaTable, write_deltalake
from pyarrow import parquet

from fixtures.jobs import following
from fixtures.loaded import pipeline_in_step
from fixtures.object_stores import absent
from fixtures.postgres import Database
from headwater.demo.airflow_server import example_dags, free_port
from headwater.demo.shop import CREATE, revenue
from servers.install import ANALYSIS

pytestmark = [pytest.mark.postgres, pytest.mark.airflow]

CUT_FILE = "HEADWATER_CUT"
EXAMPLES = example_dags() / "examples"
TODAY, BEHIND_THE_DAY = "", "2026-01-03T00:00:00+00:00"
NEVER = {"headwater": {"require": "2999-01-01T00:00:00Z", "max_wait": 0}}
RUNS: list[tuple[str, str, dict[str, Any] | None]] = [
    ("branch", TODAY, None),
    ("branch", TODAY, NEVER),
    ("several", TODAY, None),
    ("gate", TODAY, None),
    ("days", BEHIND_THE_DAY, None),
    ("dbt", TODAY, None),
    ("notebook", TODAY, None),
    ("failed", TODAY, NEVER),
    ("late", TODAY, None),
]
"""Example, logical date, and conf of the runs."""
RUNNER = """
import json, sys
from airflow.dag_processing.dagbag import DagBag
from airflow.models import dagrun
from airflow.models.asset import AssetEvent, AssetModel
from airflow.sdk import timezone
from sqlalchemy import select

FOUND = {"lag_seconds": 90.0, "freshness_seconds": 60.0, "state": "active", "reason": "no driver runs"}
LATE = {"public.orders": FOUND}
made = dagrun.get_or_create_dagrun

def with_event(*, session, **arguments):
    # The one event that a triggerer would have made: no triggerer runs here.
    run = made(session=session, **arguments)
    if run.dag_id == "headwater_example_late":
        (asset,) = session.scalars(select(AssetModel))
        payload = {"from_trigger": True, "payload": {"late": LATE, "new": list(LATE)}}
        run.consumed_asset_events.append(AssetEvent(asset_id=asset.id, extra=payload))
        session.commit()
    return run

dagrun.get_or_create_dagrun = with_event
found = DagBag(sys.argv[1])
assert not found.import_errors, found.import_errors
ended = []
for name, moment, conf in json.loads(sys.argv[2]):
    dated = {"logical_date": timezone.parse(moment)} if moment else {}
    run = found.dags["headwater_example_" + name].test(run_conf=conf, **dated)
    tasks = {}
    for ti in run.get_task_instances():
        tasks.setdefault(ti.task_id, []).append([str(ti.state), ti.xcom_pull(ti.task_id, map_indexes=ti.map_index)])
    ended.append({"state": str(run.state), "tasks": tasks})
print(json.dumps(ended, default=str))
"""


def run(*command: str, cwd: Path, environ: dict[str, str], expected: int = 0) -> str:
    """What it prints."""
    done = subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, check=False)
    assert done.returncode == expected, done.stdout[-5000:] + done.stderr[-5000:]
    return done.stdout


class Sinks:
    """A mail server and a webhook, and what came to them."""

    def __init__(self) -> None:
        self.mails: list[str] = []  # subject and text
        self.posts: list[dict[str, Any]] = []
        outer = self

        class Webhook(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                outer.posts.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(200)
                self.end_headers()
                self.wfile.write(b"ok")

            def log_message(self, format: str, *args: Any) -> None:
                pass

        self._mail = Controller(self, hostname="127.0.0.1", port=free_port())
        self._webhook = ThreadingHTTPServer(("127.0.0.1", 0), Webhook)

    async def handle_DATA(self, server: Any, session: Any, envelope: Any) -> str:  # noqa: N802  # aiosmtpd's name
        mail = message_from_bytes(envelope.content, policy=default)
        body = mail.get_body()
        assert body is not None
        self.mails.append(f"{mail['Subject']}: {body.get_content()}")
        return "250 OK"

    @property
    def environ(self) -> dict[str, str]:
        port = self._mail.port
        plain = {"disable_ssl": True, "disable_tls": True, "from_email": "airflow@example"}
        mail = {"conn_type": "smtp", "host": "127.0.0.1", "port": port, "extra": plain}
        webhook = f"http://127.0.0.1:{self._webhook.server_port}"
        slack = {"conn_type": "slackwebhook", "host": webhook, "password": "hook"}
        return {"AIRFLOW_CONN_SMTP_DEFAULT": json.dumps(mail), "AIRFLOW_CONN_SLACK_DEFAULT": json.dumps(slack)}

    def __enter__(self) -> Sinks:
        self._mail.start()
        threading.Thread(target=self._webhook.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._mail.stop()
        self._webhook.shutdown()
        self._webhook.server_close()


class Gallery:
    def __init__(
        self, database: Database, folder: Path, environ: dict[str, str], ended: list[dict[str, Any]], sinks: Sinks
    ) -> None:
        self.database, self.folder, self.environ, self.sinks = database, folder, environ, sinks
        self._ended = ended

    def run(self, example: str, conf: dict[str, Any] | None = None) -> dict[str, Any]:
        (index,) = [i for i, (name, _, given) in enumerate(RUNS) if name == example and given == conf]
        return self._ended[index]

    def result(self, example: str, task: str, conf: dict[str, Any] | None = None) -> Any:
        """What `task` returned, in a run that succeeded."""
        run = self.run(example, conf)
        assert run["state"] == "success", run
        ((state, value),) = run["tasks"][task]
        assert state == "success", run
        return value


@pytest.fixture(scope="module")
def gallery(shared_database: Database, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gallery]:
    if not (ANALYSIS / "papermill").exists():
        absent("the environment with dbt and notebooks is not there: `make servers` makes it")
    folder, home = tmp_path_factory.mktemp("shop"), tmp_path_factory.mktemp("airflow")
    with shared_database.connect() as connection:
        connection.execute(CREATE.encode())
        connection.execute("update orders set placed_at = '2026-01-02 00:00Z' where id <= 4")
        connection.execute("update orders set placed_at = '2026-01-02 23:59:59.999999Z' where id between 5 and 7")
        connection.execute("update orders set placed_at = '2026-01-03 00:00Z' where id between 8 and 9")
        connection.execute("insert into orders (customer_id) select id from customers where id <= 5")
    tables = [f"public.{name}" for name in ("customers", "orders", "order_lines")]
    pipeline = pipeline_in_step(folder, shared_database, *tables, defaults={"freshness": "1m"})
    own = {"slot": f"crm_{shared_database.name}", "publication": "crm"}
    crm = pipeline_in_step(tmp_path_factory.mktemp("crm"), shared_database, tables[0], pipeline="crm", source=own)
    environ = {
        **{name: value for name, value in os.environ.items() if not name.startswith("AIRFLOW")},
        "AIRFLOW_HOME": str(home),
        "AIRFLOW__CORE__DAGS_FOLDER": str(EXAMPLES),
        "AIRFLOW__CORE__LOAD_EXAMPLES": "False",
        "AIRFLOW__USAGE_DATA_COLLECTION__ENABLED": "False",
        "AIRFLOW_CONN_SPARK_DEFAULT": '{"conn_type": "spark", "host": "local[1]", "extra": {"deploy-mode": "client"}}',
        "PYTHONWARNINGS": "ignore",
        "PYTHONPATH": os.pathsep.join(str(example_dags().parent / name) for name in ("spark_jobs", "plugins")),
        "HEADWATER_EXAMPLE_PIPELINE": pipeline.file,
        "HEADWATER_EXAMPLE_PIPELINES": f"{pipeline.file}:{crm.file}",
        "HEADWATER_EXAMPLE_DAYS": str(folder / "days"),
        "HEADWATER_EXAMPLE_DBT": str(ANALYSIS / "dbt"),
        "HEADWATER_EXAMPLE_WAREHOUSE": str(folder / "warehouse.duckdb"),
        "HEADWATER_EXAMPLE_PAPERMILL": str(ANALYSIS / "papermill"),
        "HEADWATER_EXAMPLE_NOTEBOOKS": str(folder),
        "HEADWATER_EXAMPLE_MAIL_TO": "oncall@example",
        "DBT_SEND_ANONYMOUS_USAGE_STATS": "false",
        "IPYTHONDIR": str(folder / "ipython"),
    }
    with Sinks() as sinks, following(pipeline), following(crm):
        environ |= sinks.environ
        run(sys.executable, "-m", "airflow", "db", "migrate", cwd=home, environ=environ)
        said = run(sys.executable, "-c", RUNNER, str(EXAMPLES), json.dumps(RUNS), cwd=home, environ=environ)
        yield Gallery(shared_database, folder, environ, json.loads(said.splitlines()[-1]), sinks)


def test_a_branch_reports_from_fresh_data_or_from_the_newest_with_their_age(gallery: Gallery) -> None:
    assert gallery.result("branch", "report") == {"open_orders": 5, "stale": False}
    assert gallery.run("branch")["tasks"]["report_with_age"][0][0] == "skipped"
    stale = gallery.result("branch", "report_with_age", NEVER)
    assert (stale["open_orders"], stale["stale"]) == (5, True)
    assert stale["complete_until"]


def test_a_task_begins_when_all_pipelines_are_fresh(gallery: Gallery) -> None:
    rows = {"shop: public.customers": 1000, "shop: public.orders": 3005, "shop: public.order_lines": 9000}
    assert gallery.result("several", "rows") == {**rows, "crm: public.customers": 1000}


def test_a_report_reads_the_cut_that_was_validated(gallery: Gallery) -> None:
    sold = gallery.database.query("select sum(quantity * price)::text from order_lines")[0][0]
    assert gallery.result("gate", "sold") == {"sold": sold}
    assert gallery.result("gate", "validate")["success"] is True


def test_each_day_has_a_file_of_its_own(gallery: Gallery) -> None:
    file = Path(gallery.result("days", "write"))
    assert file == gallery.folder / "days" / "orders_2026-01-02.parquet"
    assert sorted(parquet.read_table(file)["id"].to_pylist()) == list(range(1, 8))


def test_dbt_builds_its_models_from_the_cut(gallery: Gallery) -> None:
    assert gallery.run("dbt")["state"] == "success"
    with duckdb.connect(str(gallery.folder / "warehouse.duckdb"), read_only=True) as warehouse:
        rows = warehouse.execute("select region, orders, items, revenue from revenue_per_region").fetchall()
    with gallery.database.connect() as connection:
        assert {region: tuple(rest) for region, *rest in rows} == revenue(connection)


def test_dbt_models_that_run_side_by_side_read_one_source_and_only_what_is_named(
    gallery: Gallery, tmp_path: Path
) -> None:
    project = shutil.copytree(EXAMPLES / "headwater_example_dbt", tmp_path / "project")
    profiles = yaml.safe_load((project / "profiles.yml").read_text())
    (plugin,) = profiles["headwater_example"]["outputs"]["duckdb"]["plugins"]
    plugin["config"]["tables"] = {"public.orders": {"columns": ["id", "customer_id"], "where": "id <= 10"}}
    (project / "profiles.yml").write_text(yaml.safe_dump(profiles))
    for number in range(8):
        model = f"select {number} as number, * from {{{{ source('public', 'orders') }}}}"
        (project / "models" / f"model_{number}.sql").write_text(model)
    warehouse = tmp_path / "warehouse.duckdb"
    environ = {**gallery.environ, "HEADWATER_EXAMPLE_WAREHOUSE": str(warehouse), CUT_FILE: str(_cut(gallery, tmp_path))}
    run(gallery.environ["HEADWATER_EXAMPLE_DBT"], "build", "--profiles-dir", ".", cwd=project, environ=environ)
    with duckdb.connect(str(warehouse), read_only=True) as made:
        rows = made.execute("select * from model_7 order by id").fetchall()
    expected = "select 7, id, customer_id from orders where id <= 10 order by id"
    assert rows == gallery.database.query(expected)
    said = run(
        gallery.environ["HEADWATER_EXAMPLE_DBT"], "build", cwd=project, environ={**environ, CUT_FILE: ""}, expected=2
    )
    assert "there is no cut to read" in said


SPARK_TASK = """
import json, sys
from types import SimpleNamespace
from headwater_airflow.operators.spark import SparkOnCutOperator, entry_script

python, cut, *arguments = sys.argv[1:]
quick = {"spark.databricks.delta.snapshotPartitions": "1", "spark.sql.shuffle.partitions": "2"}
SparkOnCutOperator(
    task_id="build", application=entry_script("dbt"), cut=json.load(open(cut)), application_args=arguments,
    conf={"spark.pyspark.driver.python": python, "spark.pyspark.python": python, **quick},
).execute({"ti": SimpleNamespace(xcom_push=lambda key, value: None)})
"""


def test_dbt_on_spark_builds_the_same(gallery: Gallery, tmp_path: Path) -> None:
    """In the session that headwater's entry script makes, by the Python of dbt's environment; in place of what an
    earlier run has made, of which no catalog knows."""
    reports = tmp_path / "reports"
    write_deltalake(reports / "revenue_per_region", pa.table({"region": ["north"], "orders": [0]}))
    project = str(EXAMPLES / "headwater_example_dbt")
    places = ["--project-dir", project, "--profiles-dir", project, "--target-path", str(tmp_path / "target")]
    options = ["build", *places, "--log-path", str(tmp_path), "--target", "spark"]
    environ = {**gallery.environ, "HEADWATER_EXAMPLE_REPORTS": str(reports)}
    task = ["-c", SPARK_TASK, str(ANALYSIS / "python"), str(_cut(gallery, tmp_path)), *options]
    run(sys.executable, *task, cwd=tmp_path, environ=environ)
    rows = DeltaTable(reports / "revenue_per_region").to_pyarrow_table().to_pylist()
    with gallery.database.connect() as connection:
        assert {row["region"]: (row["orders"], row["items"], row["revenue"]) for row in rows} == revenue(connection)


def _cut(gallery: Gallery, folder: Path) -> Path:
    """A file with that of the run of dbt."""
    file = folder / "cut.json"
    file.write_text(json.dumps(gallery.result("dbt", "fresh")))
    return file


def test_a_notebook_runs_on_the_cut_and_its_results_are_kept(gallery: Gallery) -> None:
    assert gallery.run("notebook")["state"] == "success"
    (file,) = gallery.folder.glob("orders_*.ipynb")
    cells = json.loads(file.read_text())["cells"]
    found = yaml.safe_load("".join(cells[-1]["outputs"][0]["data"]["text/plain"]))
    query = "select region, count(*) from orders join customers c on c.id = customer_id group by region"
    position = gallery.result("notebook", "fresh")["position"]["lsn"]
    assert found == {**dict(gallery.database.query(query)), "position": position}


def test_a_failed_wait_and_a_late_table_are_told_by_mail_and_webhook(gallery: Gallery) -> None:
    assert gallery.run("failed", NEVER)["state"] == "failed"
    assert gallery.run("late")["state"] == "success"
    late = "public.orders is 90.0 s behind; 60.0 s are allowed. no driver runs"
    assert [post["text"] for post in gallery.sinks.posts if late in post["text"]] == [late]
    assert [post for post in gallery.sinks.posts if "headwater_example_failed, fresh: timed_out" in post["text"]]
    assert [mail for mail in gallery.sinks.mails if "Late tables: " in mail and "90.0 s behind" in mail]
    assert [mail for mail in gallery.sinks.mails if "fresh failed: " in mail and "timed_out" in mail]


def test_a_task_that_was_killed_is_told_although_airflow_knows_no_exception() -> None:
    source = ast.parse((EXAMPLES / "headwater_example_alerts.py").read_text())
    (text,) = [
        ast.literal_eval(node.value)
        for node in source.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "FAILED"
    ]
    told = jinja2.Environment(undefined=jinja2.StrictUndefined).from_string(text)
    names = {"dag": {"dag_id": "report"}, "ti": {"task_id": "fresh"}}
    assert told.render(names) == "report, fresh: the task was killed: see its log"
