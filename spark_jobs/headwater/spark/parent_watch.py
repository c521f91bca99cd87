"""Ends a driver whose Airflow task is gone.

A task process that is killed with -9 leaves its Spark driver behind, and the task's retry would run a second
one beside it. The operator names its own process in the environment (id and start time: ids are reused); the
driver looks at it from a thread: each of Headwater's own, and any program that makes its session by
`headwater.session.build_session`. When it is gone, `on_gone` asks for a clean stop, and a driver that has not
ended `grace_seconds` later ends without one: the lake is safe against that, two drivers only wait for each other.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Mapping
from pathlib import Path

PARENT_PID = "HEADWATER_PARENT_PID"
PARENT_START = "HEADWATER_PARENT_START"

_watches: dict[tuple[int, str], threading.Thread] = {}


def process_start(pid: int) -> str | None:
    """When process `pid` started, in the kernel's ticks; None: no such process, or a dead one (zombie).

    Where there is no /proc, "" stands for any living process.
    """
    try:
        # Field 2 is the command in parentheses and may hold anything; the rest has fixed places (proc(5)).
        fields = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return None if Path("/proc/self/stat").exists() or not _signalable(pid) else ""
    state, start = fields[0], fields[19]
    return None if state in "ZX" else start


def parent_environment() -> dict[str, str]:
    """What names this process to a driver that it starts."""
    return {PARENT_PID: str(os.getpid()), PARENT_START: process_start(os.getpid()) or ""}


def watch_parent(
    on_gone: Callable[[], None] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    poll_seconds: float = 1.0,
    grace_seconds: float = 60.0,
) -> threading.Thread | None:
    """Starts the watch; None when no task started this driver. There is one watch of a task in a process: where it is
    watched already, this returns that watch, and `on_gone` is not called.

    `on_gone` is called once, in the watch's thread; without one the process sends itself SIGTERM, the same request
    for a stop that Airflow makes by killing a task.
    """
    environ = os.environ if environ is None else environ
    if PARENT_PID not in environ:
        return None
    pid, start = int(environ[PARENT_PID]), environ.get(PARENT_START, "")
    # One that a fork has left behind is not alive.
    if (known := _watches.get((pid, start))) is not None and known.is_alive():
        return known

    def watch() -> None:
        while process_start(pid) == start:
            time.sleep(poll_seconds)
        print(f"the task process {pid} that started this driver is gone: stopping", file=sys.stderr, flush=True)
        if on_gone is None:
            os.kill(os.getpid(), signal.SIGTERM)
        else:
            on_gone()
        time.sleep(grace_seconds)
        os._exit(1)

    thread = threading.Thread(target=watch, name="headwater-parent-watch", daemon=True)
    _watches[pid, start] = thread
    thread.start()
    return thread


def _signalable(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        return True
    return True
