"""After which load replication is begun, and of which DAG; Airflow's API is a server on this machine."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from types import SimpleNamespace
from typing import Any
from urllib.parse import parse_qs, urlsplit

import pytest

REFUSED = {"error": {"code": "no_rights", "message": "m", "where": "w", "remedy": "r"}}
LOADED = {"tables": {"public.orders": {"state": "catching up", "rows": 3}}, "seconds": 1.0}
NOTHING_NEW = {**LOADED, "skipped": ["public.orders"]}


@contextmanager
def airflow_api(monkeypatch: pytest.MonkeyPatch, runs: list[str]) -> Iterator[list[str]]:
    """Answers for a paused DAG with runs in these states. Yields what was changed."""
    changed: list[str] = []

    class Answers(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            url = urlsplit(self.path)
            states = parse_qs(url.query).get("state", runs)
            if url.path.endswith("/dagRuns"):
                self._answer({"total_entries": sum(state in states for state in runs)})
            else:
                self._answer({"access_token": "t", "is_paused": True})

        def do_PATCH(self) -> None:
            changed.append(urlsplit(self.path).path)
            self._answer(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))

        def log_message(self, format: str, *arguments: Any) -> None:
            pass

        def _answer(self, body: Any) -> None:
            content = json.dumps(body).encode()
            self.send_response(200)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

    server = ThreadingHTTPServer(("127.0.0.1", 0), Answers)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    address = {"conn_type": "http", "host": "127.0.0.1", "port": server.server_port}
    monkeypatch.setenv("AIRFLOW_CONN_HEADWATER_API", json.dumps(address))
    try:
        yield changed
    finally:
        server.shutdown()
        server.server_close()


@pytest.mark.usefixtures("airflow_home")
@pytest.mark.parametrize(
    ("xcoms", "runs", "begins"),
    [
        ({"return_value": LOADED}, [], True),
        ({"result": LOADED}, [], True),  # some tables are suspended, and the load failed
        ({"return_value": NOTHING_NEW}, [], True),  # a second load, where this could not be done behind the first
        ({"result": REFUSED}, [], False),
        ({}, [], False),
        # Unpaused too early: every run is refused, and Airflow pauses the DAG after three.
        ({"return_value": LOADED}, ["failed", "failed", "failed"], True),
        ({"return_value": LOADED}, ["queued"], True),
        ({"return_value": LOADED}, ["failed", "success"], False),
        ({"return_value": LOADED}, ["running"], False),
    ],
)
def test_a_load_that_has_loaded_begins_a_replication_that_never_went_on(
    monkeypatch: pytest.MonkeyPatch, xcoms: dict[str, Any], runs: list[str], begins: bool
) -> None:
    from headwater_airflow.operators.replication import BeginReplicationOperator

    task = BeginReplicationOperator(task_id="begin", replicate_dag_id="shop.replicate", load_task_id="load")
    context: Any = {"ti": SimpleNamespace(xcom_pull=lambda task_ids, key: xcoms.get(key))}
    with airflow_api(monkeypatch, runs) as changed:
        assert task.execute(context) is begins
    assert changed == (["/api/v2/dags/shop.replicate"] if begins else [])
