"""What must hold at the server before a pipeline can run: version, WAL, room, the role, the slot, the way there.

Each function returns problems and changes nothing. Tables are `catalog`'s subject, publications `publication`'s.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from headwater.names import quote_ident
from headwater.source.connection import Connection, errors_named, identify
from headwater.source.problems import Problem, error, warning
from headwater.source.slot import PLUGIN, SlotState, read_slot

OLDEST_VERSION = 150000
REPLICATION_ROLES = ("rds_replication",)
"""Roles by which managed services hand out REPLICATION."""


@dataclass(frozen=True, slots=True)
class Change:
    """A setting that stands in the way, or is worth a warning, and the statement that changes it."""

    code: str
    setting: str
    message: str
    statement: str
    restart: bool = False
    only_warning: bool = False

    @property
    def problem(self) -> Problem:
        made = warning if self.only_warning else error
        then = ", and restart the server" if self.restart else ", then SELECT pg_reload_conf()"
        return made(self.code, self.setting, self.message, self.statement + then)


@errors_named("source")
def server_problems(connection: Connection, slot_name: str, application_names: Iterable[str]) -> list[Problem]:
    """All findings about the server, as the current role sees it."""
    slot = read_slot(connection, slot_name)
    return [
        *_database_problems(connection),
        *(change.problem for change in setting_changes(connection, slot)),
        *_role_problems(connection),
        *standby_problems(connection, [*application_names, slot_name]),
        *_slot_problems(connection, slot),
        *pooler_problems(connection),
    ]


def version_problems(connection: Connection) -> list[Problem]:
    """Asked first and alone: an older server has no answer to the other questions."""
    if connection.info.server_version >= OLDEST_VERSION:
        return []
    message = f"server version {_setting(connection, 'server_version')}: at least 15 is needed"
    return [error("server_version", "source", message, "upgrade the server")]


def _database_problems(connection: Connection) -> list[Problem]:
    problems = []
    if identify(connection).in_recovery:
        message = "the server is a standby; reading the log from one is not supported yet"
        problems.append(error("in_recovery", "source", message, "connect to the primary"))
    encoding = _setting(connection, "server_encoding")
    if encoding == "SQL_ASCII":
        message = "the database has no encoding (SQL_ASCII): text that is not UTF-8 stops replicate"
        problems.append(warning("encoding", "source", message, "keep its text UTF-8"))
    elif encoding != "UTF8":
        message = f"the database's encoding is {encoding}: a character that UTF-8 does not have stops replicate"
        problems.append(warning("encoding", "source", message, "keep such characters out of its text"))
    return problems


@errors_named("source")
def setting_changes(connection: Connection, slot: SlotState | None) -> list[Change]:
    """The settings of the log that have to be, or should be, others. `slot`: the pipeline's, if it is there."""
    changes = []
    level = _setting(connection, "wal_level")
    if level != "logical":
        message = f"wal_level is {level}: the log does not hold what logical decoding needs"
        changes.append(
            Change(
                code="wal_level",
                setting="wal_level",
                message=message,
                statement="ALTER SYSTEM SET wal_level = logical",
                restart=True,
            )
        )
    row = connection.execute(
        """
        select (select count(*) from pg_catalog.pg_replication_slots),
               (select count(*) from pg_catalog.pg_stat_get_wal_senders())
        """
    ).fetchone()
    assert row is not None
    if slot is None:
        changes += _room(connection, "max_replication_slots", row[0], "replication slots")
    if slot is None or not slot.active:
        changes += _room(connection, "max_wal_senders", row[1], "log connections")
    if _setting(connection, "max_slot_wal_keep_size") == "-1":
        message = "no limit (-1): while nothing replicates, the log that the slot keeps may fill the source's disk"
        statement = "ALTER SYSTEM SET max_slot_wal_keep_size = '20GB'"
        changes.append(
            Change(
                code="slot_wal_unlimited",
                setting="max_slot_wal_keep_size",
                message=message,
                statement=statement,
                only_warning=True,
            )
        )
    row = connection.execute(
        "select setting, unit from pg_catalog.pg_settings"
        " where name = 'idle_replication_slot_timeout' and setting <> '0'"
    ).fetchone()
    if row is not None:
        message = f"a slot that nobody reads for {row[0]} {row[1]} is given up: a pipeline must not pause longer"
        statement = "ALTER SYSTEM SET idle_replication_slot_timeout = 0"
        changes.append(
            Change(
                code="slot_idle_timeout",
                setting="idle_replication_slot_timeout",
                message=message,
                statement=statement,
                only_warning=True,
            )
        )
    return changes


def _room(connection: Connection, setting: str, used: int, what: str) -> list[Change]:
    limit = int(_setting(connection, setting))
    if used < limit:
        return []
    message = f"all {limit} {what} are in use"
    return [
        Change(
            code=setting,
            setting=setting,
            message=message,
            statement=f"ALTER SYSTEM SET {setting} = {limit + 10}",
            restart=True,
        )
    ]


def _role_problems(connection: Connection) -> list[Problem]:
    row = connection.execute(
        """
        select current_user, exists (
            select from pg_catalog.pg_roles r where
            (r.rolname = current_user and (r.rolsuper or r.rolreplication))
            or (r.rolname = any(%s) and pg_catalog.pg_has_role(current_user, r.oid, 'USAGE')))
        """,
        [list(REPLICATION_ROLES)],
    ).fetchone()
    assert row is not None
    role, may_replicate = row
    if may_replicate:
        return []
    remedy = f"ALTER ROLE {quote_ident(role)} REPLICATION (on a managed service: GRANT rds_replication or its like)"
    return [error("no_replication_right", f"role {quote_ident(role)}", "it may not read the log", remedy)]


def standby_problems(connection: Connection, application_names: Iterable[str]) -> list[Problem]:
    """Whether a log connection under one of these names would be waited for by the source's commits."""
    setting = _setting(connection, "synchronous_standby_names")
    ours = {name.lower() for name in application_names}
    caught = sorted(name for name in standby_names(setting) if name == "*" or name.lower() in ours)
    if not caught:
        return []
    message = (
        f"synchronous_standby_names ({setting}) makes Headwater a synchronous standby: "
        "commits at the source would wait for the lake"
    )
    remedy = (
        "name the standbys that are meant: ALTER SYSTEM SET synchronous_standby_names = '...', then pg_reload_conf()"
    )
    return [error("synchronous_standby", "synchronous_standby_names", message, remedy)]


def standby_names(setting: str) -> list[str]:
    """The names in a value of `synchronous_standby_names`, without FIRST, ANY and the count before a bracket."""
    names = re.sub(r"\A\s*(?:(?:first|any)\s+)?\d+\s*\(", "", setting, flags=re.IGNORECASE)
    tokens = re.findall(r'"(?:[^"]|"")*"|[^\s,()"]+', names)
    return [token[1:-1].replace('""', '"') if token.startswith('"') else token for token in tokens]


def _slot_problems(connection: Connection, slot: SlotState | None) -> list[Problem]:
    if slot is None:
        return []
    where = f"slot {slot.name}"
    other = "choose another name under source.slot, or drop that slot if nobody needs it"
    if slot.plugin != PLUGIN:
        kind = f"uses the output plugin {slot.plugin}" if slot.plugin else "is a physical slot"
        return [error("foreign_slot", where, f"it exists and {kind}; needed is {PLUGIN}", other)]
    if slot.database != connection.info.dbname:
        message = f"it exists for the database {slot.database}, not {connection.info.dbname}"
        return [error("foreign_slot", where, message, other)]
    if slot.two_phase:
        message = "it exists and is a slot of two phases, which sends transactions before they have committed"
        return [error("foreign_slot", where, message, other)]
    if slot.loss:
        remedy = "headwater verify PIPELINE.yaml --repair, which makes a new slot and repairs what differs"
        return [error("slot_lost", where, slot.loss, remedy)]
    return []


def pooler_problems(connection: Connection) -> list[Problem]:
    """Whether something between us and the server answers in its place.

    A server names its process at connect; a pooler makes that name up and hands our statements to processes of its
    own choice, so session settings and exported snapshots would be lost.
    """
    row = connection.execute("select pg_catalog.pg_backend_pid()").fetchone()
    assert row is not None
    if row[0] == connection.info.backend_pid:
        return []
    message = "a connection pooler stands in between: it does not keep one server session for one connection"
    return [error("connection_pooler", "source.connection", message, "connect to the PostgreSQL server itself")]


def _setting(connection: Connection, name: str) -> str:
    row = connection.execute("select pg_catalog.current_setting(%s)", [name]).fetchone()
    assert row is not None
    return str(row[0])
