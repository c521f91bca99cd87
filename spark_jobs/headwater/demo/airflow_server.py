"""`airflow standalone` in a folder of its own, on a free loopback port, and gone again whatever happens.

Only processes are started here: the engine imports nothing of Airflow. All of them, and the Spark drivers that
tasks start, belong to one session or name this folder in their environment, so that none is left behind: Airflow
gives tasks their own process groups, and signalling the parent's group alone would miss them.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from types import TracebackType
from typing import Self

from headwater.demo.rest import AirflowClient
from headwater.errors import Refused, Transient
from headwater.spark.session import SHORT_LIVED_JVM

_HEALTHY_SECONDS = 300.0


class AirflowServer:
    """Airflow with its files in `home`; `environ` is added to the environment of every task."""

    def __init__(self, home: Path, dags_folder: Path, environ: Mapping[str, str], *, parallelism: int = 4) -> None:
        if importlib.util.find_spec("airflow") is None:
            raise Refused("Airflow is not installed", code="no_airflow", remedy="install the extra headwater[airflow]")
        self.home = home
        self.log = home / "standalone.log"
        self.port = free_port()
        self.client = AirflowClient(self.address)
        self._environ = {**_environment(home, dags_folder, self.port, parallelism), **environ}
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def process_id(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Starts it and returns at once; `wait_until_healthy` waits."""
        self.home.mkdir(parents=True, exist_ok=True)
        # The script beside this interpreter, by its interpreter: PATH may hold another Airflow, or none.
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "airflow", "standalone"],
                cwd=self.home,
                env=self._environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def wait_until_healthy(self, seconds: float = _HEALTHY_SECONDS) -> None:
        deadline = time.monotonic() + seconds
        while not self.client.healthy():
            if self._process is None or self._process.poll() is not None:
                raise Transient(f"Airflow ended while it started: {self.log_tail()}", where=str(self.log))
            if time.monotonic() > deadline:
                raise Transient(f"Airflow is not healthy after {seconds:.0f} s: {self.log_tail()}", where=str(self.log))
            time.sleep(0.25)

    def log_tail(self) -> str:
        with contextlib.suppress(OSError):
            return self.log.read_text(encoding="utf-8", errors="replace")[-3000:]
        return ""

    def stop(self) -> None:
        if self._process is not None:
            end_processes(self._process.pid, self.home)
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(5)
            self._process = None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()


def end_processes(session: int | None, home: Path, *, grace_seconds: float = 8.0) -> None:
    """Ends what runs in `session` or has `home` as its AIRFLOW_HOME: politely, then not."""
    deadline = time.monotonic() + grace_seconds
    asked: set[int] = set()
    while members := _members(session, home):
        late = time.monotonic() > deadline
        for pid in members:
            if late or pid not in asked:
                with contextlib.suppress(ProcessLookupError, PermissionError):
                    os.kill(pid, signal.SIGKILL if late else signal.SIGTERM)
                asked.add(pid)
        if late and time.monotonic() > deadline + grace_seconds:
            return  # unkillable (in the kernel): nothing more can be done from here
        time.sleep(0.1)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def checkout() -> Path | None:
    """The folder that holds dags/, plugins/ and spark_jobs/; None when Headwater runs as an installed package."""
    folder = Path(__file__).resolve().parents[3]
    return folder if (folder / "dags").is_dir() and (folder / "plugins" / "headwater_airflow").is_dir() else None


def example_dags() -> Path:
    """The folder of the DAG files that come with Headwater."""
    here = checkout()
    folder = Path(__file__).resolve().parents[1] / "example_dags" if here is None else here / "dags"
    if not folder.is_dir():
        raise Refused("the DAG files that come with Headwater are missing", where=str(folder), code="no_dags")
    return folder


def _members(session: int | None, home: Path) -> set[int]:
    """Living processes of the session, or started with this home. Read from /proc, never our own."""
    mark = f"AIRFLOW_HOME={home}".encode()
    found = set()
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit() or int(entry.name) == os.getpid():
            continue
        with contextlib.suppress(OSError):
            fields = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()
            if fields[0] not in "ZX" and (
                int(fields[3]) == session or mark in (entry / "environ").read_bytes().split(b"\0")
            ):
                found.add(int(entry.name))
    return found


def _environment(home: Path, dags_folder: Path, port: int, parallelism: int) -> dict[str, str]:
    """A clean configuration: no setting of another Airflow of this user reaches it."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("AIRFLOW", "PYTHONSTARTUP"))}
    address = f"http://127.0.0.1:{port}"
    paths = [os.path.dirname(sys.executable), kept.get("PATH", os.defpath)]
    here = checkout()
    modules = [] if here is None else [str(here / "spark_jobs"), str(here / "plugins")]
    settings = {
        "CORE__DAGS_FOLDER": str(dags_folder),
        "CORE__PLUGINS_FOLDER": str(_plugins_folder(home)),
        "CORE__EXECUTOR": "LocalExecutor",
        "CORE__LOAD_EXAMPLES": "False",
        "CORE__PARALLELISM": str(parallelism),
        "CORE__SIMPLE_AUTH_MANAGER_ALL_ADMINS": "True",
        "CORE__EXECUTION_API_SERVER_URL": f"{address}/execution/",
        "API__HOST": "127.0.0.1",
        "API__PORT": str(port),
        "API__BASE_URL": address,
        "API__WORKERS": "1",
        "API__EXPOSE_CONFIG": "False",
        "API_AUTH__JWT_SECRET": os.urandom(32).hex(),
        # Each of four services would load the history of the database that `standalone` has just made.
        "DATABASE__CHECK_MIGRATIONS": "False",
        # SQLite lets one of them write at a time; the others give up after five seconds, which a busy machine needs.
        "DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{home}/airflow.db?timeout=60",
        "SCHEDULER__SCHEDULER_IDLE_SLEEP_TIME": "0.5",
        "SCHEDULER__SCHEDULER_HEARTBEAT_SEC": "2",
        "DAG_PROCESSOR__REFRESH_INTERVAL": "5",
        "DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "20",
        "DAG_PROCESSOR__PARSING_PROCESSES": "1",
        "LOGGING__BASE_LOG_FOLDER": str(home / "logs"),
        "USAGE_DATA_COLLECTION__ENABLED": "False",
    }
    spark = {"conn_type": "spark", "host": "local[2]", "extra": {"deploy-mode": "client"}}
    return {
        **kept,
        **{f"AIRFLOW__{name}": value for name, value in settings.items()},
        "AIRFLOW_HOME": str(home),
        "JDK_JAVA_OPTIONS": SHORT_LIVED_JVM,
        "AIRFLOW_CONN_SPARK_DEFAULT": json.dumps(spark),
        "PATH": os.pathsep.join(paths),
        "PYTHONPATH": os.pathsep.join([*modules, *filter(None, [kept.get("PYTHONPATH")])]),
        "NO_PROXY": ",".join(filter(None, ["127.0.0.1,localhost", kept.get("NO_PROXY")])),
        "PYTHONWARNINGS": "ignore",
    }


def _plugins_folder(home: Path) -> Path:
    """The checkout's, unless the plugin is registered by an installed distribution: twice is an error in the UI."""
    registered = any(point.name == "headwater" for point in metadata.entry_points(group="airflow.plugins"))
    here = checkout()
    if registered or here is None:
        empty = home / "plugins"
        empty.mkdir(parents=True, exist_ok=True)
        return empty
    return here / "plugins"
