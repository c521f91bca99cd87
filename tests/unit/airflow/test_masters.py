"""Where drivers may run, and what of an operator's arguments reaches spark-submit: by the provider's own hook, whose
command nobody runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from headwater_airflow.operators.spark import HeadwaterSparkOperator

PASSWORD = "not-to-be-seen"
SOURCE = f"postgresql://someone:{PASSWORD}@db.example/shop"

pytestmark = pytest.mark.usefixtures("airflow_home")


@pytest.fixture
def pipeline(tmp_path: Path) -> str:
    file = tmp_path / "shop.yaml"
    file.write_text(
        f"pipeline: shop\nsource: {{connection: '${{HEADWATER_SOURCE}}'}}\n"
        f"lake: {{root: 'file://{tmp_path}/lake'}}\ntables: [public.orders]\n"
    )
    return str(file)


def operator_for(
    monkeypatch: pytest.MonkeyPatch, pipeline: str, connection: dict[str, Any], **arguments: Any
) -> HeadwaterSparkOperator:
    from headwater_airflow.operators.spark import LoadOperator

    monkeypatch.setenv("AIRFLOW_CONN_SPARK_DEFAULT", json.dumps({"conn_type": "spark", **connection}))
    monkeypatch.setenv("HEADWATER_SOURCE", SOURCE)
    operator = LoadOperator(task_id="load", pipeline=pipeline, **arguments)
    operator._connection_environment = {"HEADWATER_SOURCE": SOURCE}  # as of an Airflow connection
    return operator


@pytest.mark.parametrize(
    ("host", "more"),
    [
        ("local[2]", {}),
        ("spark://master:7077", {}),
        ("yarn", {"queue": "night"}),
        ("k8s://https://cluster.example:6443", {"namespace": "etl"}),
    ],
)
def test_in_client_mode_every_master_is_taken_and_no_secret_is_an_argument(
    monkeypatch: pytest.MonkeyPatch, pipeline: str, host: str, more: dict[str, str]
) -> None:
    from airflow.providers.apache.spark.hooks import spark_submit

    if host.startswith("k8s"):
        monkeypatch.setattr(
            spark_submit, "kube_client", object(), raising=False
        )  # its provider, of which nothing is asked here
    connection = {"host": host, "extra": {"deploy-mode": "client", **more}}
    operator = operator_for(monkeypatch, pipeline, connection, env_vars={"OF_MINE": "1"})
    hook = operator._get_hook()
    command = hook._build_spark_submit_command(operator.application)
    assert command[command.index("--master") + 1] == host
    assert PASSWORD not in " ".join(command)
    assert not [word for word in command if "OF_MINE" in word or "HEADWATER_SOURCE" in word]
    assert hook._env is not None
    assert (hook._env["HEADWATER_SOURCE"], hook._env["OF_MINE"]) == (SOURCE, "1")
    if "queue" in more:
        assert command[command.index("--queue") + 1] == "night"
    if "namespace" in more:
        assert "spark.kubernetes.namespace=etl" in command


def test_cluster_mode_is_refused_and_kubernetes_without_its_provider_says_what_is_missing(
    monkeypatch: pytest.MonkeyPatch, pipeline: str
) -> None:
    from airflow.providers.apache.spark.hooks import spark_submit
    from airflow.sdk.exceptions import AirflowFailException

    cluster = {"host": "yarn", "extra": {"deploy-mode": "cluster"}}
    with pytest.raises(AirflowFailException, match="run beside their task"):
        operator_for(monkeypatch, pipeline, cluster)._get_hook()
    monkeypatch.delattr(spark_submit, "kube_client", raising=False)
    kubernetes = {"host": "k8s://https://cluster.example", "extra": {"deploy-mode": "client"}}
    with pytest.raises(AirflowFailException, match="wants apache-airflow-providers-cncf-kubernetes"):
        operator_for(monkeypatch, pipeline, kubernetes)._get_hook()


def test_what_the_base_operator_takes_reaches_spark_submit(
    monkeypatch: pytest.MonkeyPatch, pipeline: str, tmp_path: Path
) -> None:
    keytab = tmp_path / "etl.keytab"
    keytab.touch()
    given: dict[str, Any] = {
        "keytab": str(keytab),
        "principal": "etl@EXAMPLE",
        "proxy_user": "reports",
        "yarn_queue": "night",
        "spark_binary": "spark3-submit",
        "driver_memory": "3g",
        "executor_cores": 2,
        "executor_memory": "4g",
        "num_executors": 5,
        "files": "a.conf",
        "conf": {"spark.sql.shuffle.partitions": "7"},
        "post_submit_commands": ["true"],
    }
    connection = {"host": "yarn", "extra": {"deploy-mode": "client"}}
    operator = operator_for(monkeypatch, pipeline, connection, **given)
    hook = operator._get_hook()
    command = hook._build_spark_submit_command(operator.application)
    assert command[0] == "spark3-submit"
    for option, value in (
        ("--keytab", str(keytab)),
        ("--principal", "etl@EXAMPLE"),
        ("--proxy-user", "reports"),
        ("--queue", "night"),
        ("--driver-memory", "3g"),
        ("--executor-cores", "2"),
        ("--executor-memory", "4g"),
        ("--num-executors", "5"),
        ("--files", "a.conf"),
    ):
        assert command[command.index(option) + 1] == value
    assert "spark.sql.shuffle.partitions=7" in command
    assert hook._post_submit_commands == ["true"]
