"""The stack of docker/compose.yaml, without Docker: each service's own command, with Headwater from its wheel.

The lake lies in the stack's object store, and nothing is mounted where Spark's workers run.
"""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from decimal import Decimal

import psycopg
import pytest

from fixtures.compose import Stack
from fixtures.installed import distributions, install
from fixtures.waiting import until
from headwater import store_options
from headwater.delta.small_tables import open_version
from headwater.demo import shop
from headwater.demo.rest import AirflowClient
from headwater.demo.story import DOWNSTREAM, LOAD, REPLICATE
from headwater.lake.position_file import read_position_file
from headwater.store_options import StoreOptions

pytestmark = [pytest.mark.airflow, pytest.mark.postgres, pytest.mark.spark]


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    folder = tmp_path_factory.mktemp("compose")
    _, wheel = distributions(folder / "dist")
    with Stack(folder / "root", install(wheel, folder / "image")) as stack:
        for service in stack.services:
            stack.start(service)
        yield stack


def logged_in(address: str, user: str, password: str) -> AirflowClient:
    client = AirflowClient(address)
    answer = client._send("POST", f"{address}/auth/token", {"username": user, "password": password})
    client._token = answer["access_token"]
    return client


def test_the_example_runs_on_the_cluster_and_its_answer_is_the_sources(stack: Stack) -> None:
    assert not [volume for volume in stack.services["spark-worker"]["volumes"] if ":" in volume]
    given = stack.services["scheduler"]["environment"]
    secrets = {"access_key_id": given["AWS_ACCESS_KEY_ID"], "secret_access_key": given["AWS_SECRET_ACCESS_KEY"]}
    endpoint = stack.here(given["AWS_ENDPOINT_URL"])
    store = StoreOptions(endpoint, given["AWS_REGION"], None, tuple(secrets.items()))
    source = psycopg.connect(stack.here(stack.services["scheduler"]["environment"]["HEADWATER_SOURCE"]))
    airflow = logged_in(stack.here("http://api-server:8080"), "admin", stack.settings["AIRFLOW_ADMIN_PASSWORD"])
    until(lambda: {LOAD, REPLICATE, DOWNSTREAM} <= airflow.dag_ids(), "Airflow shows the DAGs", 300)
    assert not airflow.import_errors()
    run = airflow.trigger(LOAD)
    assert airflow.wait_for_run(LOAD, run, 600) == "success", airflow.log(LOAD, run, "load")
    # The load has unpaused it, through the API, with the password from the same file of settings.
    lake = "s3://headwater/shop"
    store_options.register("s3://headwater", store)
    until(lambda: (file := read_position_file(lake)) is not None and file.epoch > 0, "an epoch is published", 600)

    source.execute("update order_lines set quantity = quantity + 1 where order_id % 2 = 0")
    source.commit()
    run = airflow.trigger(DOWNSTREAM)
    assert airflow.wait_for_run(DOWNSTREAM, run, 600) == "success"
    rows = open_version("s3://headwater/example_revenue").to_pyarrow_table().to_pylist()
    found = {row["region"]: (row["orders"], row["items"], Decimal(row["revenue"])) for row in rows}
    assert found == shop.revenue(source)
    applications = (stack.folder / "spark-master.log").read_text()
    assert "headwater example" in applications
    assert "Launching executor" in applications


def test_every_service_is_healthy_by_the_check_that_the_file_names(stack: Stack) -> None:
    airflow = [name for name, service in stack.services.items() if "healthy.py" in str(service.get("healthcheck"))]
    assert sorted(airflow) == ["api-server", "dag-processor", "scheduler", "triggerer"]
    assert all(stack._is_healthy(name) for name in airflow)
    check = [str(stack._programs / "python"), str(stack.path("/opt/headwater/healthy.py")), "nobody"]
    assert subprocess.run(check, capture_output=True).returncode != 0
