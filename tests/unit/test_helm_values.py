"""docker/helm/values.yaml, the values for Airflow's Helm chart: what they name is there, and no secret is in them."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import re
import signal
import stat
import subprocess
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from fixtures.waiting import until

ROOT = Path(__file__).resolve().parents[2]
TEXT = (ROOT / "docker" / "helm" / "values.yaml").read_text(encoding="utf-8")
VALUES: dict[str, Any] = yaml.safe_load(TEXT)
DOCKERFILE = (ROOT / "docker" / "Dockerfile").read_text(encoding="utf-8")
COMPOSE: dict[str, Any] = yaml.safe_load((ROOT / "docker" / "compose.yaml").read_text(encoding="utf-8"))
ENVIRONMENT: dict[str, str] = {one["name"]: one["value"] for one in VALUES["env"]}
SECRETS: dict[str, tuple[str, str]] = {
    one["envName"]: (one["secretName"], one["secretKey"]) for one in VALUES["secret"]
}
SECRET = "headwater"
COMPONENTS = ("scheduler", "triggerer", "dagProcessor")


def test_the_image_is_that_of_the_compose_file_with_the_airflow_that_is_pinned() -> None:
    image = f"{VALUES['defaultAirflowRepository']}:{VALUES['defaultAirflowTag']}"
    assert image == COMPOSE["x-headwater"]["image"]
    assert VALUES["defaultAirflowTag"] == tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    pinned = re.findall(r"^apache-airflow==(\S+)$", (ROOT / "requirements" / "runtime.in").read_text(), re.MULTILINE)
    assert [VALUES["airflowVersion"]] == pinned
    assert set(re.findall(r"\bheadwater:\d+\.\d+\.\d+", TEXT)) == {
        image
    }  # in the commands and in the image on top, too
    assert f"--file docker/Dockerfile --tag {image} ." in TEXT


def test_paths_and_user_are_those_of_the_image() -> None:
    assert f"COPY dags {VALUES['dags']['mountPath']}\n" in DOCKERFILE
    assert not VALUES["dags"]["gitSync"]["enabled"]
    assert not VALUES["dags"]["persistence"]["enabled"]
    assert f"WORKDIR {VALUES['airflowHome']}\n" in DOCKERFILE
    assert re.findall(r"^USER (\S+)$", DOCKERFILE, re.MULTILINE) == [str(VALUES["uid"])]
    assert f"useradd --uid {VALUES['uid']} --user-group" in DOCKERFILE  # so the group has this number, too
    assert VALUES["gid"] == VALUES["uid"]
    assert VALUES["config"]["core"]["simple_auth_manager_passwords_file"].startswith(f"{VALUES['airflowHome']}/")


def test_every_setting_of_headwater_is_one_that_is_read_and_none_is_given_twice() -> None:
    named = set(re.findall(r"\bHEADWATER_[A-Z_]+", TEXT))
    code = [*(ROOT / "spark_jobs").rglob("*.py"), *(ROOT / "plugins").rglob("*.py"), *(ROOT / "dags").rglob("*.py")]
    read = "".join(path.read_text(encoding="utf-8") for path in code)
    # The source's is read by the pipeline file that names it.
    read += "".join(path.read_text(encoding="utf-8") for path in (ROOT / "docker" / "pipelines").glob("*.yaml"))
    assert {name for name in named if not re.search(rf"\b{name}\b", read)} == set()
    assert {"HEADWATER_PIPELINES", "HEADWATER_SOURCE", "HEADWATER_WARM_UP_SECONDS"} <= named
    given = [one["name"] for one in VALUES["env"]] + [one["envName"] for one in VALUES["secret"]]
    assert len(set(given)) == len(given)
    assert {name for name in named if name not in given} == set()


def test_what_the_services_of_the_compose_file_are_told_is_told_here() -> None:
    """But for what the chart itself says, and for what only the example has."""
    told = set(COMPOSE["x-airflow"]["environment"]) - {"<<"} | set(COMPOSE["x-store"])
    of_the_chart = {
        "AIRFLOW_HOME",
        "AIRFLOW__API_AUTH__JWT_SECRET",
        "AIRFLOW__API__SECRET_KEY",
        "AIRFLOW__CORE__DAGS_FOLDER",
        "AIRFLOW__CORE__EXECUTION_API_SERVER_URL",
        "AIRFLOW__CORE__EXECUTOR",
        "AIRFLOW__CORE__FERNET_KEY",
        "AIRFLOW__CORE__LOAD_EXAMPLES",
        "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN",
    }
    of_the_example = {"AWS_ENDPOINT_URL", "HEADWATER_EXAMPLE_OUTPUT", "SPARK_CONF_DIR"}
    configured = {
        f"AIRFLOW__{section.upper()}__{key.upper()}" for section, keys in VALUES["config"].items() for key in keys
    }
    assert told - of_the_chart - of_the_example <= {*ENVIRONMENT, *SECRETS, *configured}
    assert VALUES["executor"] == COMPOSE["x-airflow"]["environment"]["AIRFLOW__CORE__EXECUTOR"]
    connection = json.loads(ENVIRONMENT["AIRFLOW_CONN_SPARK_DEFAULT"])
    assert connection == {"conn_type": "spark", "host": "local[2]", "extra": {"deploy-mode": "client"}}


def test_the_pipelines_are_mounted_where_they_are_looked_for() -> None:
    (mount,) = VALUES["volumeMounts"]
    (volume,) = VALUES["volumes"]
    assert mount == {"name": volume["name"], "mountPath": ENVIRONMENT["HEADWATER_PIPELINES"], "readOnly": True}
    assert f"create configmap {volume['configMap']['name']} --from-file=docker/pipelines\n" in TEXT
    assert list((ROOT / "docker" / "pipelines").glob("*.yaml"))


def test_no_secret_is_in_it_and_each_that_it_asks_for_is_in_the_file_that_the_user_writes() -> None:
    secret = re.compile(r"PASSWORD|SECRET|TOKEN|SOURCE|ACCESS_KEY|SQL_ALCHEMY|FERNET|AIRFLOW_CONN_HEADWATER_API")
    assert [name for name in ENVIRONMENT if secret.search(name)] == []
    assert {name for name, _ in SECRETS.values()} == {SECRET}
    for key, value in _leaves(VALUES):
        assert not re.search(r"://[^/\s]*:[^/\s]*@", str(value)), key
        assert not re.search(r'"password":\s*"', str(value)), key
        assert "pass" not in key.rpartition(".")[2].lower() or key == "config.core.simple_auth_manager_passwords_file"
    # What is in the comments has dots in the place of what is secret.
    assert set(re.findall(r'"password": "([^"]*)"', TEXT)) == {"..."}
    assert set(re.findall(r"://\w+:([^@\s]*)@", TEXT)) == {"..."}
    of_the_chart = {
        "connection": VALUES["data"]["metadataSecretName"],
        "fernet-key": VALUES["fernetKeySecretName"],
        "jwt-secret": VALUES["jwtSecretName"],
        "api-secret-key": VALUES["apiSecretKeySecretName"],
    }
    assert set(of_the_chart.values()) == {SECRET}
    assert f"create secret generic {SECRET} --from-env-file=headwater.env\n" in TEXT
    written = dict(re.findall(r"^#   ([a-z-]+)=(\S.*)$", TEXT, re.MULTILINE))
    assert set(written) == {*of_the_chart, *(key for _, key in SECRETS.values())}
    assert set(VALUES) & {"fernetKey", "jwtSecret", "apiSecretKey", "webserverSecretKey", "extraSecrets"} == set()


def test_the_databases_driver_is_one_that_the_image_has() -> None:
    (driver,) = re.findall(r"#   connection=postgresql\+(\w+)://", TEXT)
    assert re.search(rf"^{driver}==", (ROOT / "requirements" / "runtime.txt").read_text(), re.MULTILINE)
    assert SECRETS["AIRFLOW__DATABASE__SQL_ALCHEMY_CONN_ASYNC"] == (SECRET, "connection")
    assert not VALUES["postgresql"]["enabled"]


def test_nothing_is_started_that_the_image_lacks() -> None:
    assert all(not re.search(r"/entrypoint|/clean-logs", str(value)) for _, value in _leaves(VALUES))
    jobs = {"scheduler": "SchedulerJob", "triggerer": "TriggererJob", "dagProcessor": "DagProcessorJob"}
    for component in COMPONENTS:
        probes = [probe for name, probe in VALUES[component].items() if name.endswith("Probe")]
        assert len(probes) == 1 + (component == "scheduler")
        check = ["airflow", "jobs", "check", "--job-type", jobs[component], "--local"]
        assert all(probe == {"command": check} for probe in probes)
        assert VALUES[component]["logGroomerSidecar"]["args"][:2] == ["bash", "-c"]
    assert not VALUES["createUserJob"]["enabled"]  # `airflow users` is fab's
    assert not VALUES["statsd"]["enabled"]
    module, _, name = VALUES["config"]["core"]["auth_manager"].rpartition(".")
    found = importlib.util.find_spec("airflow")
    assert found is not None
    assert found.origin is not None
    source = Path(found.origin).parents[1].joinpath(*module.split(".")).with_suffix(".py")
    assert f"class {name}(" in source.read_text(encoding="utf-8")


def test_a_slice_has_time_for_a_clean_stop() -> None:
    for part in (VALUES["scheduler"], VALUES["workers"]["kubernetes"]):
        assert part["terminationGracePeriodSeconds"] >= 60
        assert part["resources"]["requests"]["memory"].endswith("Gi")


def test_the_api_server_starts_with_the_log_in_of_the_connection(tmp_path: Path) -> None:
    shell, option, script = VALUES["apiServer"]["args"]
    file = VALUES["config"]["core"]["simple_auth_manager_passwords_file"]
    assert script.count(file) == 1
    airflow = tmp_path / "airflow"
    airflow.write_text('#!/bin/sh\necho "started: $*"\n')
    airflow.chmod(0o755)
    connection = {"conn_type": "http", "login": "admin", "password": 'it\'s "quoted" $HOME'}
    done = subprocess.run(
        [shell, option, script.replace(file, str(tmp_path / "passwords.json"))],
        env={
            "PATH": f"{tmp_path}:{os.environ['PATH']}",
            "AIRFLOW_CONN_HEADWATER_API": json.dumps(connection),
        },
        capture_output=True,
        text=True,
    )
    assert (done.returncode, done.stdout) == (0, "started: api-server\n"), done.stderr
    written = tmp_path / "passwords.json"
    assert json.loads(written.read_text()) == {"admin": connection["password"]}
    assert stat.S_IMODE(written.stat().st_mode) == 0o600
    users = VALUES["config"]["core"]["simple_auth_manager_users"]
    (login,) = re.findall(r'#   headwater-api=.*"login": "(\w+)"', TEXT)
    assert users == f"{login}:admin"


def test_old_logs_are_removed_and_the_groomer_ends_when_it_is_asked_to(tmp_path: Path) -> None:
    shell, option, script = VALUES["scheduler"]["logGroomerSidecar"]["args"]
    assert all(VALUES[component]["logGroomerSidecar"]["args"] == [shell, option, script] for component in COMPONENTS)
    logs = f"{VALUES['airflowHome']}/logs"
    assert script.count(logs) == 1
    old, new = tmp_path / "dag_id=shop.load" / "old.log", tmp_path / "new.log"
    old.parent.mkdir()
    for file in (old, new):
        file.touch()
    os.utime(old, (0, 0))
    with subprocess.Popen([shell, option, script.replace(logs, str(tmp_path))], start_new_session=True) as groomer:
        try:
            until(lambda: not old.exists(), "the old log is gone")
            groomer.terminate()
            assert groomer.wait(30) == 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(groomer.pid, signal.SIGKILL)  # its `sleep`, which would end with the container
    assert new.exists()


def _leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Each scalar with the names that lead to it, dotted; those of a list's items have none."""
    if isinstance(value, dict):
        for key, part in value.items():
            yield from _leaves(part, f"{path}.{key}".lstrip("."))
    elif isinstance(value, list):
        for part in value:
            yield from _leaves(part, path)
    else:
        yield path, value
