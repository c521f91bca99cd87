"""The process between an embedded PostgreSQL server and the program that started it.

Run by path as a script of its own, standard library only:
`python -I postgres_supervisor.py PARENT_PID UID GID POSTGRES DATA_DIRECTORY` (UID -1 keeps the user).
It starts the server, passes on the stop modes that it reads from its standard input (`smart`, `fast`,
`immediate`, one per line), and ends with the server's exit status.

The server ends whatever happens to the others:
- the starting program dies, also by SIGKILL: the pipe to it reaches its end, and the parent process changes.
  Both are watched, since a forked child of that program may hold the pipe open;
- this process dies by SIGKILL: the kernel sends the server SIGQUIT (Linux, PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import ctypes
import os
import select
import signal
import subprocess
import sys

SIGNALS = {b"smart": signal.SIGTERM, b"fast": signal.SIGINT, b"immediate": signal.SIGQUIT}
_PR_SET_PDEATHSIG = 1
_TICK_SECONDS = 0.2
_PATIENCE_SECONDS = 10.0


def main(arguments: list[str]) -> int:
    parent, user, group = (int(argument) for argument in arguments[:3])
    # A Ctrl-C in the terminal belongs to the starting program: it decides when the server stops.
    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    server = _start(arguments[3], arguments[4], user, group)
    signal.signal(signal.SIGTERM, lambda *_: server.send_signal(signal.SIGQUIT))
    pending = b""
    while server.poll() is None:
        readable, _, _ = select.select([0], [], [], _TICK_SECONDS)
        received = os.read(0, 4096) if readable else None
        if received == b"" or os.getppid() != parent:
            _end(server)
            break
        *lines, pending = (pending + (received or b"")).split(b"\n")
        for line in lines:
            server.send_signal(SIGNALS[line])
    return server.wait()


def _start(postgres: str, data_directory: str, user: int, group: int) -> subprocess.Popen[bytes]:
    libc = ctypes.CDLL(None) if sys.platform == "linux" else None
    supervisor = os.getpid()

    def tie_to_supervisor() -> None:
        # Runs after the change of user, which would clear it.
        for number in (signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        if libc is not None:
            libc.prctl(_PR_SET_PDEATHSIG, int(signal.SIGQUIT), 0, 0, 0)
            if os.getppid() != supervisor:
                os._exit(1)

    identity = {} if user < 0 else {"user": user, "group": group, "extra_groups": []}
    return subprocess.Popen(  # type: ignore[call-overload,no-any-return]
        [postgres, "-D", data_directory],
        stdin=subprocess.DEVNULL,
        preexec_fn=tie_to_supervisor,
        cwd="/",
        **identity,
    )


def _end(server: subprocess.Popen[bytes]) -> None:
    server.send_signal(signal.SIGQUIT)
    try:
        server.wait(_PATIENCE_SECONDS)
    except subprocess.TimeoutExpired:
        server.kill()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
