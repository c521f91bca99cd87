"""Everything the demo starts, in one folder: PostgreSQL with the shop, the pipeline file, Airflow. Ended together."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from psycopg import sql

from headwater.delta import storage
from headwater.demo import shop
from headwater.demo.airflow_server import AirflowServer, example_dags
from headwater.demo.oracle import Oracle
from headwater.demo.postgres import EmbeddedServer

PIPELINE = "shop"
FOLDER_PREFIX = "headwater_demo_"
_ROLE = "headwater"

_PIPELINE_FILE = """\
pipeline: shop
source:
  connection: ${{HEADWATER_SOURCE}}
lake:
  root: {root}
tables:
{tables}
"""


@dataclass(frozen=True)
class Demo:
    """What runs. `connection` is the source's own administrator: Headwater has a role that may only read. `root`: the
    lake's, as the pipeline file has it."""

    folder: Path
    server: EmbeddedServer
    airflow: AirflowServer
    connection: shop.Connection
    oracle: Oracle
    pipeline_file: Path
    root: str
    output: Path
    source: str

    @property
    def lake(self) -> Path:
        """The lake's folder; it is on disk unless something else was asked for."""
        return self.folder / "lake"


@contextlib.contextmanager
def demo_environment(
    *,
    slice_seconds: float = 600,
    folder: Path | None = None,
    dags: Path | None = None,
    environ: Mapping[str, str] | None = None,
    lake: str = "",
) -> Iterator[Demo]:
    """Starts source and Airflow (which goes on starting) and ends both, with all their children, whatever happens.
    `dags`: another folder of DAG files than that of the examples; `environ`: more of Airflow's environment; `lake`: a
    place in an object store, below which the lake is made, and removed at the end."""
    folder = Path(tempfile.mkdtemp(prefix=FOLDER_PREFIX)) if folder is None else folder
    folder.chmod(0o711)  # under root, PostgreSQL runs as another user, who must pass through
    with _cleanup() as cleanup:
        cleanup.callback(shutil.rmtree, folder, ignore_errors=True)
        pipeline_file, output = folder / "pipelines" / "shop.yaml", folder / "revenue"
        root = f"{lake.rstrip('/')}/{folder.name}" if lake else (folder / "lake").as_uri()
        storage.make_folder(root)
        if lake:
            cleanup.callback(storage.delete_folder, root)
        _write_pipeline(pipeline_file, root)
        server = cleanup.enter_context(EmbeddedServer(folder / "postgres", durable=False))
        password = secrets.token_urlsafe(18)
        source = f"postgresql://{_ROLE}:{quote(password, safe='')}@127.0.0.1:{server.port}/shop"
        # Airflow takes longest to start: the shop is filled meanwhile.
        airflow = AirflowServer(
            folder / "airflow",
            dags or example_dags(),
            {
                "HEADWATER_SOURCE": source,
                "HEADWATER_PIPELINES": str(pipeline_file.parent),
                "HEADWATER_SLICE_SECONDS": f"{slice_seconds:g}",
                "HEADWATER_EXAMPLE_OUTPUT": str(output),
                **(environ or {}),
            },
        )
        cleanup.enter_context(airflow)
        connection = cleanup.enter_context(contextlib.closing(_create_shop(server, password)))
        yield Demo(folder, server, airflow, connection, Oracle(connection), pipeline_file, root, output, source)


@contextlib.contextmanager
def _cleanup() -> Iterator[contextlib.ExitStack]:
    """A stack that a second Ctrl-C does not disturb once it unwinds: that would leave processes behind."""
    handlers: dict[int, Any] = {}
    try:
        with contextlib.ExitStack() as stack:
            try:
                yield stack
            finally:
                if threading.current_thread() is threading.main_thread():
                    for number in (int(signal.SIGINT), int(signal.SIGTERM)):
                        handlers[number] = signal.signal(number, signal.SIG_IGN)
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _write_pipeline(file: Path, root: str) -> None:
    file.parent.mkdir()
    tables = "\n".join(f"  - public.{table}" for table in shop.TABLES)
    file.write_text(_PIPELINE_FILE.format(root=root, tables=tables), encoding="utf-8")


def _create_shop(server: EmbeddedServer, password: str) -> shop.Connection:
    with server.connect() as administrator:
        administrator.execute("create database shop")
    connection = server.connect("shop")
    connection.execute("create role shop nologin")
    connection.execute(
        sql.SQL("create role {} login replication password {}").format(sql.Identifier(_ROLE), sql.Literal(password))
    )
    connection.execute("grant create on database shop to shop")
    connection.execute("grant usage, create on schema public to shop")
    connection.execute("set role shop")
    connection.execute(shop.CREATE.encode())
    connection.execute("reset role")
    # Its own publications need the tables' owner; everything else needs SELECT and REPLICATION only.
    connection.execute(sql.SQL("grant shop to {}").format(sql.Identifier(_ROLE)))
    return connection


def process_environment(demo: Demo) -> dict[str, str]:
    """For Headwater's own command line beside the demo."""
    return {**os.environ, "HEADWATER_SOURCE": demo.source}
