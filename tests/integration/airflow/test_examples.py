"""The gallery: each example in dags/examples runs as it is, on a lake that a driver follows, and gives what the source
has. One process runs all of them: Airflow's start is what costs."""

from __future__ import annotations

import json
import os
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
import pytest
import yaml
from aiosmtpd.controller import Controller
from deltalake import DeltaTable
from pyarrow import parquet

from fixtures.jobs import following
from fixtures.loaded import pipeline_in_step
from fixtures.object_stores import absent
from fixtures.postgres import Database
from headwater.demo.airflow_server import example_dags, free_port
from headwater.demo.shop import CREATE, revenue
from servers.install import ANALYSIS

pytestmark = [pytest.mark.postgres, pytest.mark.airflow]

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
        connection.execute("update orders set placed_at = '2026-01-02 12:00Z' where id <= 7")
        connection.execute("insert into orders (customer_id) select id from customers where id <= 5")
    tables = [f"public.{name}" for name in ("customers", "orders", "order_lines")]
    pipeline = pipeline_in_step(folder, shared_database, *tables, defaults={"freshness": "1m"})
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
        "HEADWATER_EXAMPLE_PIPELINES": pipeline.file,
        "HEADWATER_EXAMPLE_DAYS": str(folder / "days"),
        "HEADWATER_EXAMPLE_DBT": str(ANALYSIS / "dbt"),
        "HEADWATER_EXAMPLE_DBT_PROJECT": str(EXAMPLES / "headwater_example_dbt"),
        "HEADWATER_EXAMPLE_WAREHOUSE": str(folder / "warehouse.duckdb"),
        "HEADWATER_EXAMPLE_PAPERMILL": str(ANALYSIS / "papermill"),
        "HEADWATER_EXAMPLE_NOTEBOOKS": str(folder),
        "HEADWATER_EXAMPLE_MAIL_TO": "oncall@example",
        "DBT_TARGET_PATH": str(folder / "target"),
        "DBT_LOG_PATH": str(folder),
        "DBT_SEND_ANONYMOUS_USAGE_STATS": "false",
        "IPYTHONDIR": str(folder / "ipython"),
    }
    with Sinks() as sinks, following(pipeline):
        environ |= sinks.environ
        for command in (["-m", "airflow", "db", "migrate"], ["-c", RUNNER, str(EXAMPLES), json.dumps(RUNS)]):
            done = subprocess.run([sys.executable, *command], env=environ, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
        yield Gallery(shared_database, folder, environ, json.loads(done.stdout.splitlines()[-1]), sinks)


def test_a_branch_reports_from_fresh_data_or_from_the_newest_with_their_age(gallery: Gallery) -> None:
    assert gallery.result("branch", "report") == {"open_orders": 5, "stale": False}
    assert gallery.run("branch")["tasks"]["report_with_age"][0][0] == "skipped"
    stale = gallery.result("branch", "report_with_age", NEVER)
    assert (stale["open_orders"], stale["stale"]) == (5, True)
    assert stale["complete_until"]


def test_a_task_begins_when_all_pipelines_are_fresh(gallery: Gallery) -> None:
    rows = {"shop: public.customers": 1000, "shop: public.orders": 3005, "shop: public.order_lines": 9000}
    assert gallery.result("several", "rows") == rows


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


def test_dbt_on_spark_builds_the_same(gallery: Gallery, tmp_path: Path) -> None:
    """In the session that headwater's entry script makes; the tables of the cut are views in it."""
    cut = tmp_path / "cut.json"
    cut.write_text(json.dumps(gallery.result("dbt", "fresh")))
    project = str(EXAMPLES / "headwater_example_dbt")
    options = ["--project-dir", project, "--profiles-dir", project, "--target", "spark"]
    command = [str(example_dags().parent / "spark_jobs" / "headwater_dbt.py"), str(cut), "build", *options]
    environ = {**gallery.environ, "HEADWATER_EXAMPLE_REPORTS": str(tmp_path / "reports")}
    for _ in range(2):  # a second run replaces what the first has made
        done = subprocess.run(
            [ANALYSIS / "python", *command], cwd=tmp_path, env=environ, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-5000:]
    rows = DeltaTable(str(tmp_path / "reports" / "revenue_per_region")).to_pyarrow_table().to_pylist()
    with gallery.database.connect() as connection:
        assert {row["region"]: (row["orders"], row["items"], row["revenue"]) for row in rows} == revenue(connection)


def test_a_notebook_runs_on_the_cut_and_its_results_are_kept(gallery: Gallery) -> None:
    assert gallery.run("notebook")["state"] == "success"
    (file,) = gallery.folder.glob("orders_*.ipynb")
    cells = json.loads(file.read_text())["cells"]
    found = yaml.safe_load("".join(cells[-1]["outputs"][0]["data"]["text/plain"]))
    query = "select region, count(*) from orders join customers c on c.id = customer_id group by region"
    assert found == dict(gallery.database.query(query))


def test_a_failed_wait_and_a_late_table_are_told_by_mail_and_webhook(gallery: Gallery) -> None:
    assert gallery.run("failed", NEVER)["state"] == "failed"
    assert gallery.run("late")["state"] == "success"
    late = "public.orders is 90.0 s behind; 60.0 s are allowed. no driver runs"
    assert [post["text"] for post in gallery.sinks.posts if late in post["text"]] == [late]
    assert [post for post in gallery.sinks.posts if "headwater_example_failed, fresh: timed_out" in post["text"]]
    assert [mail for mail in gallery.sinks.mails if "Late tables: " in mail and "90.0 s behind" in mail]
    assert [mail for mail in gallery.sinks.mails if "fresh failed: " in mail and "timed_out" in mail]
