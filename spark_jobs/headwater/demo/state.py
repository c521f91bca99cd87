"""A demo that goes on in the background (`--keep-running`): who it is, how it is found, how it is ended."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from headwater.demo.airflow_server import checkout, end_processes
from headwater.demo.environment import FOLDER_PREFIX
from headwater.errors import EXIT_DONE, EXIT_FAILED
from headwater.spark.parent_watch import process_start

_STOP_SECONDS = 60.0


@dataclass(frozen=True)
class Running:
    """The background process: `start` tells it from a later one with the same id. `address` is None until it is up."""

    pid: int
    start: str
    airflow_home: str
    address: str | None = None

    @property
    def alive(self) -> bool:
        return process_start(self.pid) == self.start

    def write(self) -> None:
        file = state_file()
        file.parent.mkdir(parents=True, exist_ok=True)
        scratch = file.with_suffix(".tmp")
        scratch.write_text(json.dumps(asdict(self)), encoding="utf-8")
        os.replace(scratch, file)


def read_state() -> Running | None:
    """The demo that runs in the background, if one does."""
    return noted if (noted := _noted()) is not None and noted.alive else None


def _noted() -> Running | None:
    """The demo that has been started in the background and not been ended by `--stop`; it may have been killed."""
    with contextlib.suppress(OSError, ValueError, TypeError):
        return Running(**json.loads(state_file().read_text(encoding="utf-8")))
    return None


def state_file() -> Path:
    here = checkout()
    if here is not None:
        return here / ".run" / "demo.json"
    base = os.environ.get("XDG_STATE_HOME") or os.path.expanduser("~/.local/state")
    return Path(base) / "headwater" / "demo.json"


def start_in_background(arguments: Sequence[str] = ()) -> int:
    """Starts the demo, with more `arguments`, as a process of its own, shows what it prints, and returns when it is up
    (or has failed)."""
    if (running := read_state()) is not None:
        print(f"the demo is already running: {running.address or 'starting'}", flush=True)
        return EXIT_DONE
    log = state_file().with_suffix(".log")
    log.parent.mkdir(parents=True, exist_ok=True)
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "headwater.cli", "demo", "--in-background", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**os.environ, "PYTHONUNBUFFERED": "1"},
            start_new_session=True,
        )
    try:
        return _follow(process, log)
    except BaseException:
        # Interrupted before it was up: nothing may stay behind.
        process.terminate()
        process.wait()
        raise


def _follow(process: subprocess.Popen[bytes], log: Path) -> int:
    with log.open(encoding="utf-8", errors="replace") as lines:
        while True:
            ended = process.poll()
            print(lines.read(), end="", flush=True)
            if ended is not None:
                return ended or EXIT_FAILED
            running = read_state()
            if running is not None and running.pid == process.pid and running.address is not None:
                print(lines.read(), end="", flush=True)
                return EXIT_DONE
            time.sleep(0.2)


def stop_background() -> int:
    """Ends the background demo and waits until nothing of it is left; also of one that was killed."""
    noted = _noted()
    if noted is None:
        state_file().unlink(missing_ok=True)
        print("no demo is running", flush=True)
        return EXIT_DONE
    lived = noted.alive
    if lived:
        os.kill(noted.pid, signal.SIGTERM)
    deadline = time.monotonic() + _STOP_SECONDS
    while noted.alive and time.monotonic() < deadline:
        time.sleep(0.1)
    if noted.alive:
        os.kill(noted.pid, signal.SIGKILL)
    home = Path(noted.airflow_home)
    end_processes(None, home)
    if home.parent.name.startswith(FOLDER_PREFIX):
        shutil.rmtree(home.parent, ignore_errors=True)
    state_file().unlink(missing_ok=True)
    print("the demo has ended" if lived else "the demo was killed; what it left behind is removed", flush=True)
    return EXIT_DONE
