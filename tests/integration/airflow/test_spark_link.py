"""The link from a task to what Spark shows of its job, with a real submission and Spark's real pages."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.spark

JOB = """
import os, time
from headwater.spark.session import build_session

spark = build_session("shop")
assert spark.range(10).count() == 10
while spark.sparkContext.uiWebUrl and not os.path.exists(os.environ["SEEN"]):
    time.sleep(0.1)
"""

TASK = """
import json, os, sys, urllib.request
from types import SimpleNamespace
from headwater_airflow.operators.links import SparkPageLink
from headwater_airflow.operators.spark import SparkOnCutOperator

seen = []

def push(key, value):
    if key == SparkPageLink().xcom_key and value.startswith("http://history"):
        seen.append("history")
    elif key == SparkPageLink().xcom_key:
        with urllib.request.urlopen(value, timeout=30) as page:  # while the job runs
            seen.append("SparkUI" if "Spark" in page.read().decode() else "something else")
        open(os.environ["SEEN"], "w").close()

cut = {"pipeline": "shop", "tables": {}}
task = SparkOnCutOperator(task_id="job", application=sys.argv[1], cut=cut, conf=json.loads(sys.argv[2]))
task.execute({"ti": SimpleNamespace(xcom_push=push)})
print(json.dumps({"running": seen, "ended": SparkPageLink().get_link(task)}))
"""


@pytest.mark.parametrize("has_ui", [True, False])
@pytest.mark.parametrize("history", ["", "http://history:18080/"])
def test_a_task_links_to_its_job(airflow_home: Path, tmp_path: Path, has_ui: bool, history: str) -> None:
    job = tmp_path / "job.py"
    job.write_text(JOB)
    conf = {"spark.ui.enabled": str(has_ui).lower(), "spark.ui.port": "0"}
    environment = {
        **os.environ,
        "AIRFLOW_CONN_SPARK_DEFAULT": '{"conn_type": "spark", "host": "local[1]", "extra": {"deploy-mode": "client"}}',
        "HEADWATER_SPARK_HISTORY_SERVER": history,
        "SEEN": str(tmp_path / "seen"),
    }
    command = [sys.executable, "-c", TASK, str(job), json.dumps(conf)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    said = json.loads(ran.stdout.splitlines()[-1])
    assert said["running"] == (["SparkUI"] if has_ui else ["history"] if history else [])
    if history:
        assert said["ended"].startswith("http://history:18080/history/local-")
    else:
        assert said["ended"] is None
