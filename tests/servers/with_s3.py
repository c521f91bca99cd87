"""Runs a command beside an S3 server of its own, which is empty but for a bucket `headwater`, and is gone behind it.

`python tests/servers/with_s3.py COMMAND ...`: the command is told where the server is, and how it is entered, by the
environment (`AWS_*`). The server is the one that `make servers` makes.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import secrets
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

VERSITYGW = Path(__file__).resolve().parents[2] / ".servers" / "go" / "versitygw"
_START_SECONDS = 30


def main(command: list[str]) -> int:
    if not VERSITYGW.exists():
        print("the S3 server is not there: `make servers` makes it, and needs Go", file=sys.stderr)
        return 2
    keys = {"ACCESS_KEY_ID": "headwater", "SECRET_ACCESS_KEY": secrets.token_hex(16)}
    with tempfile.TemporaryDirectory(prefix="headwater-s3-") as folder, socket.socket() as probe:
        (Path(folder) / "headwater").mkdir()
        probe.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{probe.getsockname()[1]}"
        probe.close()
        server = subprocess.Popen(
            [str(VERSITYGW), "--port", address, "--region", "us-east-1", "--quiet", "posix", folder],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,  # it tells of each signal
            env={**os.environ, **{f"ROOT_{name}": value for name, value in keys.items()}},
            # A Ctrl-C is the command's: the server ends when nothing uses it any more, and with this program at latest.
            start_new_session=True,
            preexec_fn=_end_with_the_parent,
        )
        try:
            _await(server, address)
            store = {"ENDPOINT_URL": f"http://{address}", "REGION": "us-east-1", **keys}
            return _run(command, {**os.environ, **{f"AWS_{name}": value for name, value in store.items()}})
        finally:
            server.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                server.wait(10)
            server.kill()
            server.wait()


def _await(server: subprocess.Popen[bytes], address: str) -> None:
    host, _, port = address.partition(":")
    deadline = time.monotonic() + _START_SECONDS
    while time.monotonic() < deadline and server.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection((host, int(port)), 1):
            return
        time.sleep(0.05)
    raise SystemExit("the S3 server does not start")


def _end_with_the_parent() -> None:
    ctypes.CDLL(None).prctl(1, int(signal.SIGKILL), 0, 0, 0)  # PR_SET_PDEATHSIG


def _run(command: list[str], environment: dict[str, str]) -> int:
    process = subprocess.Popen(command, env=environment)
    while True:
        try:
            return process.wait()
        except KeyboardInterrupt:
            pass  # the command has had it, too, and ends by itself
        except SystemExit:
            process.terminate()


def _stop(number: int, _: object) -> None:
    raise SystemExit(128 + number)


if __name__ == "__main__":
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, _stop)
    sys.exit(main(sys.argv[1:]))
