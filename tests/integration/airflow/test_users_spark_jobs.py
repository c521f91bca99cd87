"""A user's own Spark job behind SparkOnCutOperator runs with its own settings, whatever Headwater's jobs like."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fixtures.class_archive import SMALL
from headwater.spark import session
from headwater.spark.jars import LOG_STORE
from headwater_airflow.operators.submission import joined_conf

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = pytest.mark.spark

JOB = """
import json, sys
from pyspark.sql import SparkSession

spark = SparkSession.builder.getOrCreate()
spark.range(3).write.format("delta").save(sys.argv[2])
assert spark.read.format("delta").load(sys.argv[2]).count() == 3
print(json.dumps(dict(spark.sparkContext.getConf().getAll())))
"""

TASK = """
import json, sys
from types import SimpleNamespace
from headwater_airflow.operators.spark import SparkOnCutOperator

task = SparkOnCutOperator(
    task_id="job", application=sys.argv[1], cut={"pipeline": "shop", "tables": {}}, application_args=[sys.argv[2]],
    jars=sys.argv[3], conf={"spark.sql.extensions": "io.delta.sql.DeltaSparkSessionExtension"},
)
print(json.dumps(task.execute({"ti": SimpleNamespace(xcom_push=lambda key, value: None)})))
"""

OF_THE_USER = {
    "spark.sql.shuffle.partitions": "7",
    "spark.sql.adaptive.enabled": "true",
    "spark.sql.session.timeZone": "Asia/Tokyo",
    "spark.driver.memory": "700m",
    "spark.ui.enabled": "false",
    **SMALL,
}


def test_a_users_job_gets_delta_and_none_of_headwaters_settings(airflow_home: Path, tmp_path: Path) -> None:
    (tmp_path / "job.py").write_text(JOB)
    (tmp_path / "more.jar").write_bytes(b"PK\x05\x06" + bytes(18))
    (tmp_path / "spark-defaults.conf").write_text("".join(f"{name} {value}\n" for name, value in OF_THE_USER.items()))
    environment = {
        **os.environ,
        "AIRFLOW_CONN_SPARK_DEFAULT": '{"conn_type": "spark", "host": "local[1]", "extra": {"deploy-mode": "client"}}',
        "SPARK_CONF_DIR": str(tmp_path),
    }
    command = [sys.executable, "-c", TASK, *(str(tmp_path / name) for name in ("job.py", "table", "more.jar"))]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stdout + ran.stderr
    found = json.loads(ran.stdout.splitlines()[-1])
    assert {name: found.get(name) for name in OF_THE_USER} == OF_THE_USER
    # Spark adds options of its own for Java's modules.
    assert "log4j" not in found.pop("spark.driver.extraJavaOptions")
    ours = set(session.job_conf()) | set(session._REQUIRED) | set(session._TUNING) | set(session._SMALL)
    assert {name for name in ours & found.keys() if name not in OF_THE_USER} == set(session.submit_conf())
    assert found["spark.delta.logStore.file.impl"] == LOG_STORE
    assert "more.jar" in found["spark.jars"]


def test_a_jobs_jars_and_extensions_join_headwaters_and_its_settings_win() -> None:
    ours = {"spark.jars": "a.jar,b.jar", "spark.sql.extensions": "delta", "spark.driver.memory": "1g"}
    theirs = {"spark.jars": "c.jar", "spark.sql.extensions": "other,delta", "spark.driver.memory": "2g"}
    assert joined_conf(ours, theirs, "d.jar") == {
        "spark.jars": "a.jar,b.jar,c.jar,d.jar",
        "spark.sql.extensions": "delta,other",
        "spark.driver.memory": "2g",
    }
    assert joined_conf(ours, {}, None) == ours


def test_what_spark_chooses_depends_on_the_size_of_the_work(
    spark: SparkSession, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spark.range(1000).write.format("delta").save(str(tmp_path / "table"))
    frame = spark.read.format("delta").load(str(tmp_path / "table"))

    def chosen() -> tuple[str | None, str | None]:
        return spark.conf.get("spark.sql.shuffle.partitions"), spark.conf.get("spark.sql.adaptive.enabled")

    session.suit(spark, frame)
    assert chosen() == ("2", "false")
    monkeypatch.setattr(session, "_SMALL_BYTES", 100)
    session.suit(spark, frame)
    assert chosen() == ("200", "true")
    session.suit(spark)
    assert chosen() == ("2", "false")
