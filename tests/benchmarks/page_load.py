"""The pages of a pipeline with many tables: from the click to the rows in a real browser, and what the server takes.

HEADWATER_BENCH_TABLES says how many (500), HEADWATER_BENCH_EPOCHS how many epochs lie in the ledger (120), each in a
file of its own: more are gathered by upkeep. The lake's control files are real and made by hand, the source is a real
PostgreSQL with those tables, published. `first`: by a server that has seen nothing yet; `later`: the median of the next
ones.
Reference of the same run: a static file of the same server, and `headwater status`, which shows the same in a shell.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from figures import figure
from mixed_load import server

from headwater.demo.postgres import EmbeddedServer
from headwater.pipeline_file.pipeline import Pipeline, load_pipeline
from headwater.source.catalog.catalog import read_catalog
from headwater.source.connection import connect, position_now

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

TABLES = int(os.environ.get("HEADWATER_BENCH_TABLES", "500"))
EPOCHS = int(os.environ.get("HEADWATER_BENCH_EPOCHS", "120"))
WHAT, STATIC = f"the page of a pipeline with {TABLES} tables, {EPOCHS} epochs in the ledger", "a static file"
ROUNDS = 7


def make_source(source: EmbeddedServer) -> list[str]:
    names = [f"public.m{number}" for number in range(TABLES)]
    with source.connect("postgres") as connection:
        for name in names:
            connection.execute(f"create table {name} (id bigint primary key, a int, note text)")
        connection.execute(f"create publication headwater_bench for table {', '.join(names)}")
        connection.execute("create publication headwater_bench_inserts with (publish = 'insert, truncate')")
        connection.execute("select pg_create_logical_replication_slot('headwater_bench', 'pgoutput')")
    return names


def make_lake(pipeline: Pipeline, names: list[str]) -> None:
    """As a driver leaves it: each epoch touches a tenth of the tables."""
    from fixtures.lakes import HandLake

    with closing(connect(pipeline.conninfo())) as connection:
        position = position_now(connection)
        schemas = {str(table.name): table.schema for table in read_catalog(connection, pipeline).tables}
    root = Path(pipeline.lake_path())
    lake = HandLake(root, position.at(position.lsn - (EPOCHS + 1) * 1000), names, pipeline="bench")
    records = [replace(lake.registry.record(name), schemas=((position.lsn, schemas[name]),)) for name in names]
    lake.registry.write(*records)
    for number in range(1, EPOCHS + 1):
        start = number * (TABLES // 10) % TABLES
        lake.publish(lake.position.lsn + 1000, *names[start : start + TABLES // 10])


@contextmanager
def airflow(home: Path) -> Iterator[str]:
    """The app behind Airflow's own authentication; yields a token."""
    os.environ.update(
        AIRFLOW_HOME=str(home),
        AIRFLOW__CORE__LOAD_EXAMPLES="False",
        AIRFLOW__API_AUTH__JWT_SECRET=os.urandom(32).hex(),
        PYTHONWARNINGS="ignore",
    )
    from airflow import settings
    from airflow.api_fastapi.app import create_auth_manager
    from airflow.api_fastapi.auth.managers.simple.user import SimpleAuthManagerUser
    from airflow.models import import_all_models
    from airflow.models.base import Base

    import_all_models()  # type: ignore[no-untyped-call]
    manager = create_auth_manager()
    assert settings.engine is not None
    Base.metadata.create_all(settings.engine)
    yield manager.generate_jwt(SimpleAuthManagerUser(username="somebody", role="admin"))


@contextmanager
def serve(app: Any) -> Iterator[str]:
    import uvicorn

    with socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        running = uvicorn.Server(uvicorn.Config(app, log_level="error"))
        thread = threading.Thread(target=running.run, args=([listening],), daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{listening.getsockname()[1]}"
        running.should_exit = True
        thread.join()


def timed(client: Any, path: str) -> float:
    began = time.perf_counter()
    answer = client.get(path)
    assert answer.status_code == 200, answer.text
    return time.perf_counter() - began


def in_browser(address: str, token: str) -> list[float]:
    """Seconds from the start of the navigation until every table stands there, for several visits."""
    from selenium.webdriver import Chrome, ChromeOptions
    from selenium.webdriver.chrome.service import Service

    from fixtures.browser import _FLAGS

    options = ChromeOptions()
    options.binary_location = "/usr/bin/chromium"
    with tempfile.TemporaryDirectory() as profile:
        for flag in (*_FLAGS, f"--user-data-dir={profile}"):
            options.add_argument(flag)
        driver = Chrome(options=options, service=Service("/usr/bin/chromedriver"))
        driver.set_script_timeout(60)
        try:
            driver.get(f"{address}/headwater/static/x/icon.svg")
            driver.add_cookie({"name": "_token", "value": token})
            seconds = []
            for _ in range(ROUNDS):
                driver.get(f"{address}/headwater/pipelines/bench")
                seconds.append(
                    driver.execute_async_script(
                        "const [wanted, done] = arguments;"
                        "const look = () => document.querySelectorAll(\"a[href*='/tables/']\").length >= wanted"
                        " ? done(performance.now() / 1000) : requestAnimationFrame(look); look();",
                        TABLES,
                    )
                )
            return seconds
        finally:
            driver.quit()


def main() -> None:
    import httpx
    from fastapi import FastAPI

    with tempfile.TemporaryDirectory(prefix="headwater-bench-") as scratch, server() as source:
        folder = Path(scratch)
        folder.chmod(0o755)
        names = make_source(source)
        file = folder / "bench.yaml"
        file.write_text(
            f"pipeline: bench\nsource: {{connection: '{source.conninfo()}'}}\n"
            f"lake: {{root: '{folder}/lake'}}\ntables: ['public.*']\n"
        )
        make_lake(load_pipeline(file), names)
        with airflow(folder / "airflow") as token:
            from headwater_airflow.page.app import create_app
            from headwater_airflow.page.watches import Watches

            app = FastAPI()
            app.mount("/headwater", create_app(Watches(lambda: str(folder))))
            headers = {"Authorization": f"Bearer {token}"}
            with serve(app) as address, httpx.Client(base_url=f"{address}/headwater/", headers=headers) as client:
                timed(client, "static/x/page.js")
                static = statistics.median(timed(client, "static/x/page.js") for _ in range(ROUNDS))
                for name, path in (
                    ("all pipelines", "api/pipelines"),
                    ("the pipeline", "api/pipelines/bench"),
                    ("a table", "api/pipelines/bench/tables/public.m7"),
                    ("the metrics", "metrics"),
                ):
                    answer = f"{WHAT}: the server's answer for {name}"
                    figure(f"{answer}, the first time", timed(client, path), "s", STATIC, static)
                    later = statistics.median(timed(client, path) for _ in range(ROUNDS))
                    figure(f"{answer}, later", later, "s", STATIC, static)
                size = len(client.get("api/pipelines/bench").content)
                figure(f"{WHAT}: size of the answer for the pipeline", size / 1000, "kB")
            app = FastAPI()
            app.mount("/headwater", create_app(Watches(lambda: str(folder))))
            with serve(app) as address:
                shown = in_browser(address, token)
        began = time.perf_counter()
        done = subprocess.run(
            [sys.executable, "-m", "headwater.cli", "status", str(file), "--json"],
            capture_output=True,
            text=True,
            check=False,
        )
        assert len(json.loads(done.stdout)["tables"]) == TABLES, done.stderr
        command = time.perf_counter() - began
    status = "headwater status"
    figure(f"{WHAT}: in a browser, the first visit", shown[0], "s", status, command)
    figure(f"{WHAT}: in a browser, later", statistics.median(shown[1:]), "s", status, command)


if __name__ == "__main__":
    main()
