"""The few calls of Airflow's REST API that the demo needs, by the standard library alone."""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import Any
from urllib.parse import quote

from headwater.errors import HeadwaterError, Transient

_FINISHED = ("success", "failed")
_TRIES = 5
_PAUSE_SECONDS = 2.0
_READ_SECONDS, _WRITE_SECONDS = 30.0, 90.0
"""For an answer. Two of Airflow's writers that wait for each other wait as long as its database lets them
(`airflow_server`: 60 s), and only then is it known that nothing was changed."""


class AirflowClient:
    """A client of an Airflow without log-in (`simple_auth_manager_all_admins`) at `address`."""

    def __init__(self, address: str) -> None:
        self.address = address.rstrip("/")
        self._token: str | None = None

    def call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """The answer to one call below /api/v2; HeadwaterError with Airflow's own words when it refuses."""
        if self._token is None:
            self._token = self._send("GET", f"{self.address}/auth/token", None)["access_token"]
        return self._send(method, f"{self.address}/api/v2/{path}", body)

    def healthy(self) -> bool:
        """Whether metadata database, scheduler, triggerer and DAG processor all report themselves healthy."""
        try:
            health = self._send("GET", f"{self.address}/api/v2/monitor/health", None)
        except HeadwaterError:
            return False
        parts = ("metadatabase", "scheduler", "triggerer", "dag_processor")
        return all((health.get(part) or {}).get("status") == "healthy" for part in parts)

    def dag_ids(self) -> set[str]:
        return {dag["dag_id"] for dag in self.call("GET", "dags?limit=1000")["dags"]}

    def import_errors(self) -> list[dict[str, Any]]:
        """Of DAG files, and of plugins."""
        dags = self.call("GET", "importErrors")["import_errors"]
        return [*dags, *self.call("GET", "plugins/importErrors")["import_errors"]]

    def is_paused(self, dag_id: str) -> bool:
        return bool(self.call("GET", f"dags/{dag_id}")["is_paused"])

    def set_paused(self, dag_id: str, paused: bool) -> None:
        self.call("PATCH", f"dags/{dag_id}?update_mask=is_paused", {"is_paused": paused})

    def trigger(self, dag_id: str, conf: dict[str, Any] | None = None) -> str:
        """Starts a run; its id."""
        started = self.call("POST", f"dags/{dag_id}/dagRuns", {"logical_date": None, "conf": conf or {}})
        return str(started["dag_run_id"])

    def run(self, dag_id: str, run_id: str) -> dict[str, Any]:
        return dict(self.call("GET", f"dags/{dag_id}/dagRuns/{quote(run_id, safe='')}"))

    def runs(self, dag_id: str) -> list[dict[str, Any]]:
        return list(self.call("GET", f"dags/{dag_id}/dagRuns?order_by=-id")["dag_runs"])

    def task(self, dag_id: str, run_id: str, task_id: str) -> dict[str, Any]:
        return dict(self.call("GET", _task(dag_id, run_id, task_id)))

    def tasks(self, dag_id: str, run_id: str) -> dict[str, str | None]:
        """The state of each task of a run."""
        found = self.call("GET", f"dags/{dag_id}/dagRuns/{quote(run_id, safe='')}/taskInstances?limit=100")
        return {task["task_id"]: task["state"] for task in found["task_instances"]}

    def xcom(self, dag_id: str, run_id: str, task_id: str, key: str = "return_value") -> Any:
        return self.call("GET", f"{_task(dag_id, run_id, task_id)}/xcomEntries/{key}?deserialize=true")["value"]

    def log(self, dag_id: str, run_id: str, task_id: str, try_number: int = 1) -> str:
        """The task's log as text, for a failure's report."""
        content = self.call("GET", f"{_task(dag_id, run_id, task_id)}/logs/{try_number}?full_content=true")["content"]
        return "\n".join(_text(line) for line in content)

    def wait_for_run(
        self, dag_id: str, run_id: str, seconds: float, on_change: Callable[[str, str | None], None] | None = None
    ) -> str:
        """The run's final state; `on_change(task, state)` for every change of a task on the way."""
        deadline = time.monotonic() + seconds
        seen: dict[str, str | None] = {}
        while True:
            state = self.run(dag_id, run_id)["state"]
            if on_change is not None:
                tasks = self.tasks(dag_id, run_id)
                for task in [task for task, task_state in tasks.items() if seen.get(task) != task_state]:
                    on_change(task, tasks[task])
                seen = tasks
            if state in _FINISHED:
                return str(state)
            if time.monotonic() > deadline:
                tasks = self.tasks(dag_id, run_id)
                raise Transient(f"the run has not ended after {seconds:.0f} s: {tasks}", where=f"{dag_id} {run_id}")
            time.sleep(0.5)

    def _send(self, method: str, url: str, body: dict[str, Any] | None) -> Any:
        # A machine that starts several engines at once may keep the API waiting; only what has changed nothing is
        # repeated.
        for _ in range(_TRIES - 1):
            try:
                return self._send_once(method, url, body)
            except _RolledBack:
                time.sleep(_PAUSE_SECONDS)
            except Transient:
                if method != "GET":
                    raise
        return self._send_once(method, url, body)

    def _send_once(self, method: str, url: str, body: dict[str, Any] | None) -> Any:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(url, data=data, headers=headers, method=method)
        try:
            patience = _READ_SECONDS if method == "GET" else _WRITE_SECONDS
            with urllib.request.urlopen(request, timeout=patience) as response:
                return json.loads(response.read() or b"null")
        except urllib.error.HTTPError as error:
            text = error.read().decode(errors="replace")[:1000]
            kind = _RolledBack if error.code == 500 and "Database error" in text else HeadwaterError
            raise kind(f"Airflow answered {error.code}: {text}", where=f"{method} {url}") from None
        except (urllib.error.URLError, OSError, ValueError) as error:
            raise Transient(f"Airflow does not answer: {error}", where=url) from None


class _RolledBack(Transient):
    """Airflow's database has refused: it is SQLite's file here, which only one may write at a time."""


def _task(dag_id: str, run_id: str, task_id: str) -> str:
    return f"dags/{dag_id}/dagRuns/{quote(run_id, safe='')}/taskInstances/{task_id}"


def _text(line: Any) -> str:
    """One line of a task's log: Airflow keeps an exception's own words beside the event."""
    if not isinstance(line, dict):
        return str(line)
    errors = [f"{error.get('exc_type')}: {error.get('exc_value')}" for error in line.get("error_detail") or ()]
    return "\n".join([str(line.get("event", "")), *errors])
