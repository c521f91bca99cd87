"""Beginning a pipeline's replication when its first load is done, and resuming it.

Airflow 3 gives tasks no way to unpause a DAG but the public REST API. Its address and log-in come from the Airflow
connection `headwater_api` (host, port, schema http or https; login and password, or a token as the password alone).
Without one, the address is that of the task's own API and no log-in is tried, which Airflow answers only when
configured so (`simple_auth_manager_all_admins`).
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowException, AirflowNotFoundException

from headwater_airflow.hooks.source import connection_environment
from headwater_airflow.hooks.store import store_environment
from headwater_airflow.operators.submission import submission_environment

if TYPE_CHECKING:
    import httpx
    from airflow.sdk import Context


class BeginReplicationOperator(BaseOperator):
    """Unpauses `replicate_dag_id` after the first load: there was nothing to replicate before. One that has a run that
    goes on or has succeeded stays as it is, as a person may have paused it. Returns whether it was unpaused.

    A load that ended with some tables suspended has failed, and has loaded the others: it counts. One that failed
    altogether answers with its error, and does not count.
    """

    def __init__(
        self, *, replicate_dag_id: str, load_task_id: str, api_conn_id: str = "headwater_api", **arguments: Any
    ) -> None:
        super().__init__(**arguments)
        self.replicate_dag_id = replicate_dag_id
        self.load_task_id = load_task_id
        self.api_conn_id = api_conn_id

    def execute(self, context: Context) -> bool:
        dag = self.replicate_dag_id
        pull = context["ti"].xcom_pull
        answers = [pull(task_ids=self.load_task_id, key=key) for key in ("return_value", "result")]
        if all((answer or {}).get("tables") is None for answer in answers):
            self.log.info("nothing was loaded: %s stays as it is", dag)
            return False
        with contextlib.closing(_api(self.api_conn_id)) as api:
            # Runs that failed tell of no person: unpaused before the first load they all fail, and then Airflow itself
            # pauses the DAG. Nor do queued ones, which a paused DAG keeps from beginning.
            runs = _call(api, "GET", f"dags/{dag}/dagRuns", limit=1, state=["running", "success"])
            ran_before = int(runs["total_entries"]) > 0
            if ran_before or not _call(api, "GET", f"dags/{dag}")["is_paused"]:
                self.log.info("%s stays as it is", dag)
                return False
            _call(api, "PATCH", f"dags/{dag}", {"is_paused": False}, update_mask="is_paused")
        self.log.info("unpaused %s", dag)
        return True


class ResumeOperator(BaseOperator):
    """Does what `headwater resume` does for the whole pipeline: drivers replicate again. It starts none, and where
    nothing was paused it changes nothing. XCom: what `headwater resume --json` prints."""

    template_fields: Sequence[str] = ("pipeline",)

    def __init__(self, *, pipeline: str, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.pipeline = pipeline

    def execute(self, context: Context) -> dict[str, Any]:
        from headwater.pipeline_file.pipeline import load_pipeline

        pipeline = load_pipeline(self.pipeline)
        of_source, of_lake = pipeline.source.airflow_connection, pipeline.lake.airflow
        # The command itself: the engine is loaded by processes of its own.
        ended = subprocess.run(
            [sys.executable, "-m", "headwater.cli", "resume", self.pipeline, "--json"],
            env={
                **os.environ,
                **submission_environment(),
                **(connection_environment(of_source) if of_source is not None else {}),
                **(store_environment(of_lake) if of_lake else {}),
            },
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
            check=False,
        )
        said: dict[str, Any] = json.loads(ended.stdout or "{}")
        if ended.returncode != 0:
            error = said.get("error") or {}
            told = ". What to do: ".join(filter(None, [error.get("message"), error.get("remedy")]))
            raise AirflowException(told or f"headwater resume ended with status {ended.returncode}")
        self.log.info("%s", said["done"])
        return said


def _api(conn_id: str) -> httpx.Client:
    """A client of Airflow's public REST API, logged in."""
    import httpx
    from airflow.sdk import BaseHook, conf

    user = password = None
    try:
        connection = BaseHook.get_connection(conn_id)
    except AirflowNotFoundException:
        # Tasks reach the API server under this address in any case; api.base_url may be for browsers only.
        execution_api = conf.get("core", "execution_api_server_url", fallback="") or ""
        address = execution_api.rstrip("/").removesuffix("/execution") or conf.get("api", "base_url", fallback="")
        address = address or f"http://localhost:{conf.get('api', 'port', fallback='8080')}"
    else:
        user, password = connection.login, connection.password
        host = connection.host or "localhost"
        address = host if "://" in host else f"{connection.schema or 'http'}://{host}"
        address += f":{connection.port}" if connection.port else ""
    client = httpx.Client(base_url=address.rstrip("/"), timeout=30)
    try:
        token = password
        if user is not None:
            token = _answer(client.post("/auth/token", json={"username": user, "password": password}))["access_token"]
        elif password is None:
            token = _answer(client.get("/auth/token"))["access_token"]
    except (httpx.HTTPError, AirflowException) as error:
        client.close()
        raise AirflowException(
            f"cannot log in to Airflow's API at {address} ({error}): replication cannot be begun. "
            f"Create the Airflow connection {conn_id!r} with the API's address, login and password (or a token "
            "as the password), for a user who may edit DAGs"
        ) from None
    client.headers["Authorization"] = f"Bearer {token}"
    return client


def _call(
    api: httpx.Client, method: str, path: str, body: dict[str, Any] | None = None, **query: Any
) -> dict[str, Any]:
    return _answer(api.request(method, f"/api/v2/{path}", json=body, params=query))


def _answer(response: httpx.Response) -> dict[str, Any]:
    if response.is_error:
        raise AirflowException(f"{response.request.url.path} answered {response.status_code}")
    return dict(response.json())
