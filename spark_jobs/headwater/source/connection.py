"""SQL connections to the source: how they are made, what their failures are called, which server they reached.

`connect` fixes every session setting that changes what a value looks like or how long a statement may take, so
that a role's or database's own defaults cannot. Failures become `SourceUnreachable` (try again) or `Refused` (a
person must act). No message, and nothing that a raised error carries along, holds a password: errors made here
are raised outside of the handler of the driver's error, so that not even its chain refers to it.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

import psycopg
from psycopg import conninfo as libpq

from headwater.errors import HeadwaterError, Refused, SourceUnreachable, Transient
from headwater.position import Position, parse_lsn
from headwater.source.renewal import newest, renewed

_Answer = TypeVar("_Answer")

Connection = psycopg.Connection[tuple[Any, ...]]

_CONNECT_DEFAULTS: dict[str, str | int] = {
    "connect_timeout": 10,
    "keepalives": 1,
    "keepalives_idle": 30,
    "keepalives_interval": 10,
    "keepalives_count": 3,
    "tcp_user_timeout": 60_000,
}
# Values in one text form whatever the role's defaults are; rows that row-level security would hide are an error.
_SESSION: dict[str, str] = {
    "DateStyle": "ISO, MDY",
    "IntervalStyle": "postgres",
    "TimeZone": "UTC",
    "extra_float_digits": "1",
    "bytea_output": "hex",
    "lc_monetary": "C",
    "row_security": "off",
    # Behind a lock the catalog is judged as it is then, not as a snapshot from before the wait has it.
    "default_transaction_isolation": "read committed",
    "default_transaction_deferrable": "off",
    "default_transaction_read_only": "off",  # as a role that reads may have it: publications are ours to change
    # A backslash in the pipeline file's `where` is one.
    "standard_conforming_strings": "on",
    "idle_in_transaction_session_timeout": "0",
    # Leases and loads have sessions that say nothing for hours.
    "idle_session_timeout": "0",
}
# The text that every server version sends at a failed log-in, in English: libpq gives no SQLSTATE there.
_LOGIN_FAILURES: tuple[tuple[str, str, str], ...] = (
    (
        "password authentication failed|no password supplied|SCRAM",
        "wrong_password",
        "correct the user or the password",
    ),
    ('database ".*" does not exist|28000.*database', "unknown_database", "correct the database's name"),
    (
        "certificate verify failed|root certificate file|does not match host name|host name must be specified"
        "|could not (?:open|load|read) .*(?:certificate|private key)|private key file|weak sslmode"
        "|alert .*(?:certificate|unknown ca)|server does not support SSL",
        "bad_connection",
        "correct the host, or sslmode, sslrootcert, sslcert or sslkey, in the connection",
    ),
    (
        r"invalid \w+ value\b|invalid port number|could not match \d+",
        "bad_connection",
        "correct this option in the connection",
    ),
    (
        'role ".*" does not exist|no pg_hba.conf entry|is not permitted to log in|authentication failed'
        "|permission denied for database|not permitted to connect|peer authentication|certificate",
        "not_authorised",
        "create the role with LOGIN and CONNECT, and let pg_hba.conf admit it from this machine",
    ),
)
_BAD_TEXT_REMEDY = (
    "write postgresql://user:password@host:port/database (in it, percent-encode every character of user and password"
    " that is not a letter or a digit, and write @ behind the question mark as %40) or host=... dbname=... user=..."
    " password=..."
)
_LIBPQ_HINT = re.compile(r"\s*Is the server running [^?]*\?")
_admitted: set[str] = set()
"""Where a server has let this process in. A password that it refuses later was changed: the next try may bring the new
one, while a person has to correct one that was never right."""
_SHUTTING_DOWN, _NOBODY_LISTENS, _ANSWERED = "the database system is shutting down", "Connection refused", "FATAL:"
_CANCELLED = {"57014": "timeout", "55P03": "lock_timeout", "25P03": "timeout", "25P04": "timeout"}


@dataclass(frozen=True, slots=True)
class ServerIdentity:
    """Which log a connection would read. `version` as libpq prints it: 180006 is 18.6."""

    system_id: str
    timeline: int
    version: int
    in_recovery: bool


def connect(
    conninfo: str,
    *,
    application_name: str = "headwater",
    autocommit: bool = True,
    statement_timeout: float = 0,
    lock_timeout: float = 0,
) -> Connection:
    """A session with fixed settings; both time-outs in seconds, 0 for none.

    Raises `SourceUnreachable` (also where a password that this process was let in with is refused by now) or `Refused`;
    neither repeats more of `conninfo` than user, host, port and database.
    """
    conninfo = newest(conninfo)
    options = _parse(conninfo)
    where = _where(options)
    connection: Connection | None = None
    try:
        connection = psycopg.connect(
            **{**_CONNECT_DEFAULTS, **options, "application_name": application_name, "client_encoding": "utf8"},
            autocommit=True,
            prepare_threshold=None,  # a pooler in between may hand each statement to another server session
        )
        _admitted.add(where)
        _fix_session(connection, statement_timeout, lock_timeout)
        connection.autocommit = autocommit
        return connection
    except psycopg.Error as error:
        failure = _login_failure(error, options, where)
        asked = error.pgconn is not None and error.pgconn.used_password  # by the last of several hosts
        wants_password = connection is None and (asked or failure.code == "wrong_password")
    if wants_password and (newer := renewed(conninfo)) is not None:
        return connect(
            newer,
            application_name=application_name,
            autocommit=autocommit,
            statement_timeout=statement_timeout,
            lock_timeout=lock_timeout,
        )
    if failure.code == "wrong_password" and where in _admitted:
        failure = SourceUnreachable(
            f"{failure.message}; this process was let in before",
            code="password_changed",
            where=where,
            remedy="start it again with the new password: the next try of a task fetches Airflow's connection again",
        )
    if connection is not None:
        connection.close()
    raise failure


def says_it_stops(failure: Exception) -> bool:
    """Whether a failed `connect` means that the server goes: it says so, or nobody listens at any of its addresses. One
    that admits no more sessions, or not this role, may go on for long."""
    told = str(failure)
    return _SHUTTING_DOWN in told or (_NOBODY_LISTENS in told and _ANSWERED not in told)


class Session:
    """A long-lived session that is made again, with credentials asked anew, when it is found broken: a server may
    restart under a driver. For questions that may be asked twice. One thread at a time."""

    def __init__(self, conninfo: Callable[[], str], connection: Connection, application_name: str) -> None:
        """`connection`: the session to begin with."""
        self._conninfo, self._connection, self._name = conninfo, connection, application_name

    def ask(self, question: Callable[[Connection], _Answer]) -> _Answer:
        """What `question` finds out; raises what it raises, or `SourceUnreachable`."""
        try:
            return question(self._connection)
        except Exception:
            if not self._connection.closed:
                raise
        self._connection = connect(self._conninfo(), application_name=self._name)
        return question(self._connection)

    @contextlib.contextmanager
    def apart(self) -> Iterator[Connection]:
        """A session of the caller's own, for another thread."""
        with contextlib.closing(connect(self._conninfo(), application_name=self._name)) as connection:
            yield connection

    def close(self) -> None:
        self._connection.close()


@contextlib.contextmanager
def errors_named(where: str) -> Iterator[None]:
    """Gives the driver's errors of the block their names here; `where` is what the block talks to or about.

    Errors that speak of a mistake of ours (syntax, types) or of a missing object pass as they are.
    """
    try:
        yield
    except psycopg.Error as error:
        failure = _named(error, where)
        if failure is None:
            raise
    else:
        return
    raise failure from None


def identify(connection: Connection) -> ServerIdentity:
    """Asks the server; see `position_now` for the way the timeline is found."""
    with errors_named(_where_connected(connection)):
        position, in_recovery = _position_now(connection)
    return ServerIdentity(position.system_id, position.timeline, connection.info.server_version, in_recovery)


def position_now(connection: Connection) -> Position:
    """Where the log ends: on a primary the insert position, on a standby what has been replayed there.

    The primary's timeline is part of the name of the WAL file being written: `pg_control_checkpoint` still shows
    the old one after a promotion, until the next checkpoint. A standby has no such name, and there the newest of
    its checkpoint and its recovery target is shown: right, but late by up to a restart point after a promotion.
    """
    with errors_named(_where_connected(connection)):
        return _position_now(connection)[0]


def primary_position(connection: Connection) -> Position:
    """As `position_now`, and never of a standby: `SourceUnreachable` (`in_recovery`), see `not_the_primary`."""
    with errors_named(_where_connected(connection)):
        position, in_recovery = _position_now(connection)
    if in_recovery:
        raise not_the_primary()
    return position


def not_the_primary() -> SourceUnreachable:
    """What has been replayed says nothing of what the primary has committed by now: a wait would end too early, and
    its clock beside that position is a sample of nothing. As good as no answer, since the primary may come back."""
    return SourceUnreachable(
        "what answers is a standby, and only its primary knows where the log ends",
        code="in_recovery",
        remedy="name the primary in source.connection; with several hosts add target_session_attrs=read-write",
    )


def _position_now(connection: Connection) -> tuple[Position, bool]:
    row = connection.execute(
        """
        select (pg_control_system()).system_identifier::text, recovering,
               case when recovering
                    then greatest((pg_control_checkpoint()).timeline_id,
                                  (pg_control_recovery()).min_recovery_end_timeline)
                    else ('x' || substr(pg_walfile_name(pg_current_wal_insert_lsn()), 1, 8))::bit(32)::int
               end,
               case when recovering then pg_last_wal_replay_lsn() else pg_current_wal_insert_lsn() end::text
          from pg_is_in_recovery() as recovering
        """
    ).fetchone()
    assert row is not None
    system_id, in_recovery, timeline, lsn = row
    return Position(system_id, timeline, parse_lsn(lsn or "0/0")), in_recovery


def _fix_session(connection: Connection, statement_timeout: float, lock_timeout: float) -> None:
    settings = {
        **_SESSION,
        "statement_timeout": f"{round(statement_timeout * 1000)}",
        "lock_timeout": f"{round(lock_timeout * 1000)}",
    }
    if connection.info.server_version >= 170000:
        settings["transaction_timeout"] = "0"
    # By statement and not by the start-up packet's `options`, which poolers refuse. One round trip.
    connection.execute(
        "select " + ", ".join(["set_config(%s, %s, false)"] * len(settings)),
        [part for setting in settings.items() for part in setting],
    )


def _parse(conninfo: str) -> dict[str, Any]:
    """The options in `conninfo`. What libpq says of a text it cannot read quotes the text: it is not repeated.

    An unencoded `@` or `/` in a URI's password moves a part of it into host, port or database, which messages
    print; such texts are refused before any of them is used.
    """
    options: dict[str, Any] | None = None
    with contextlib.suppress(psycopg.Error, UnicodeError):
        options = dict(libpq.conninfo_to_dict(conninfo))
    scheme, separator, rest = conninfo.strip().partition("://")
    if options is not None and separator and scheme in ("postgres", "postgresql"):
        authority = re.split(r"[/?#]", rest, maxsplit=1)[0]
        before_query = rest.partition("?")[0]
        if "@" in rest and not authority.count("@") == before_query.count("@") == 1:
            options = None  # behind a user the options may have it: sslrootcert=/etc/ca@corp
    ports = str((options or {}).get("port") or "")
    if options is None or not re.fullmatch(r"[0-9,]*", ports):
        raise Refused(
            "the connection is not one that libpq can read (it is not shown: it may hold a password)",
            code="bad_connection",
            where="source.connection",
            remedy=_BAD_TEXT_REMEDY,
        )
    return options


def _where(options: dict[str, Any]) -> str:
    """E.g. `PostgreSQL at db.example:5432/shop as reader`; never from more than these four options."""
    host = options.get("host") or options.get("hostaddr") or "the default host"
    port = f":{options['port']}" if options.get("port") else ""
    database = f"/{options['dbname']}" if options.get("dbname") else ""
    user = f" as {options['user']}" if options.get("user") else ""
    return f"PostgreSQL at {host}{port}{database}{user}"


def _where_connected(connection: Connection) -> str:
    info = connection.info
    try:
        return _where({"host": info.host, "port": info.port, "dbname": info.dbname, "user": info.user})
    except psycopg.Error:  # closed: there is nothing to ask any more
        return "PostgreSQL"


def _login_failure(error: psycopg.Error, options: dict[str, Any], where: str) -> HeadwaterError:
    by_state = _named(error, where)
    if error.sqlstate is not None and by_state is not None:
        return by_state
    message = _without_secrets(str(error), options)
    for pattern, code, remedy in _LOGIN_FAILURES:
        if re.search(pattern, message):
            return Refused(message, code=code, where=where, remedy=remedy)
    if not isinstance(error, psycopg.OperationalError):
        return Refused(message, code="bad_connection", where=where, remedy=_BAD_TEXT_REMEDY)
    return SourceUnreachable(message, where=where, remedy="check that the server runs and can be reached from here")


def _without_secrets(message: str, options: dict[str, Any]) -> str:
    from headwater.pipeline_file.values import LIBPQ_SECRETS

    for option in LIBPQ_SECRETS:
        if options.get(option):
            message = message.replace(str(options[option]), "***")
    # Our remedies say it shorter than libpq's question.
    return " ".join(_LIBPQ_HINT.sub("", message).split())


def _named(error: psycopg.Error, where: str) -> HeadwaterError | None:
    state = error.sqlstate
    message = _primary(error)
    if state is None:
        if isinstance(error, psycopg.OperationalError | psycopg.InterfaceError):
            return SourceUnreachable(
                message, where=where, remedy="check that the server runs and can be reached from here"
            )
        return None
    if state in ("28P01",):
        return Refused(message, code="wrong_password", where=where, remedy="correct the user or the password")
    if state == "3D000":
        return Refused(message, code="unknown_database", where=where, remedy="correct the database's name")
    if state == "42501" or state.startswith("28"):
        return Refused(
            message, code="not_authorised", where=where, remedy="grant the right that the message names to this role"
        )
    if state in _CANCELLED:
        return Transient(message, code=_CANCELLED[state], where=where, remedy="try again when the source is less busy")
    if state.startswith(("08", "57P")) or state == "53300":
        return SourceUnreachable(message, where=where, remedy="try again when the server accepts connections")
    if state.startswith(("40", "53", "58")):
        return Transient(message, where=where, remedy="try again")
    return None


def _primary(error: psycopg.Error) -> str:
    """The server's message without DETAIL and CONTEXT, which may quote rows."""
    return error.diag.message_primary or " ".join(str(error).split())
