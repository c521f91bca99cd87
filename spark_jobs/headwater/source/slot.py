"""The replication slot: create, look at, drop. Confirming is the log connection's work; its room `check`'s.

Always through SQL functions: the replication command that creates a slot ignores `statement_timeout`, and creating
one waits for every transaction that is open then.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from psycopg import errors as server_errors

from headwater.errors import LostLease, Refused, Transient
from headwater.position import format_lsn, parse_lsn
from headwater.source.connection import Connection, errors_named
from headwater.source.snapshots import wait_for_old_transactions

PLUGIN = "pgoutput"
_FAILOVER_SINCE = 170000


@dataclass(frozen=True, slots=True)
class SlotState:
    """One row of pg_replication_slots. None: not known to this server version, or not (any more) kept.

    `retained_wal_bytes`: how far the log is kept back for it. `invalidation_reason`: why it can never be read again.
    `idle_seconds`: since somebody has read it, by the server's clock (since 17); None while it is read, too.
    """

    name: str
    plugin: str
    database: str
    active: bool
    active_pid: int | None
    confirmed_lsn: int | None
    restart_lsn: int | None
    retained_wal_bytes: int | None
    wal_status: str | None
    invalidation_reason: str | None
    two_phase: bool
    failover: bool | None
    idle_seconds: float | None = None

    @property
    def is_read(self) -> bool:
        """Whether a driver holds it. One that is being made has no position yet, and no driver."""
        return self.active and self.confirmed_lsn is not None

    @property
    def loss(self) -> str:
        """Why it can never be read again; empty: it can."""
        if self.wal_status == "lost" or self.invalidation_reason:
            return f"the server has given the slot up ({self.invalidation_reason or 'lost'})"
        return ""

    def has_passed(self, lsn: int) -> bool:
        """Whether somebody has confirmed more than `lsn`: what lies in between can never be had again."""
        return self.confirmed_lsn is not None and self.confirmed_lsn > lsn


def loss_of(slot: SlotState | None) -> str:
    """Why nothing that was committed since the last confirmation can be had; empty: it can."""
    return slot.loss if slot is not None else "the slot does not exist any more"


def gap_behind(slot: SlotState | None, start: int) -> str:
    """Why the slot cannot deliver what follows the ledger's position `start`; empty: it can."""
    if slot is None or slot.loss:
        return loss_of(slot)
    if slot.confirmed_lsn is None:
        return "the slot has no position"
    if slot.has_passed(start):
        return (
            f"the slot stands at {format_lsn(slot.confirmed_lsn)}, past the ledger's {format_lsn(start)}: somebody "
            "else has read from it, and the changes in between are lost to the lake"
        )
    return ""


def read_slot(connection: Connection, name: str) -> SlotState | None:
    """The slot `name` of the whole server; a physical one has an empty plugin and database."""
    with errors_named(_where(name)):
        # As JSON: columns came with 16 and 17, and a missing one is then a missing key.
        found = connection.execute(
            """
            select to_jsonb(slot), pg_wal_lsn_diff(
                     case when pg_is_in_recovery() then pg_last_wal_replay_lsn() else pg_current_wal_insert_lsn() end,
                     slot.restart_lsn)::bigint,
                   extract(epoch from clock_timestamp() - (to_jsonb(slot) ->> 'inactive_since')::timestamptz)::float8
              from pg_replication_slots as slot where slot_name = %s
            """,
            (name,),
        ).fetchone()
    if found is None:
        return None
    row, retained, idle = found
    return SlotState(
        name=row["slot_name"],
        plugin=row["plugin"] or "",
        database=row["database"] or "",
        active=row["active"],
        active_pid=row["active_pid"],
        confirmed_lsn=_lsn(row["confirmed_flush_lsn"]),
        restart_lsn=_lsn(row["restart_lsn"]),
        retained_wal_bytes=None if retained is None else max(retained, 0),
        wal_status=row["wal_status"],
        invalidation_reason=_invalidation(row),
        two_phase=row["two_phase"],
        failover=row.get("failover"),
        idle_seconds=None if row["active"] else idle,
    )


def wal_bound(connection: Connection) -> int | None:
    """The bytes of log that the server keeps for a slot at most, by its own setting; None: it sets no bound."""
    with errors_named("max_slot_wal_keep_size"):
        row = connection.execute(
            "select setting::bigint from pg_catalog.pg_settings where name = 'max_slot_wal_keep_size'"
        ).fetchone()
    return row[0] << 20 if row is not None and row[0] >= 0 else None  # in MB


def create_statement(name: str, version: int, failover: Literal["auto", "on", "off"] = "auto") -> str:
    """The statement that creates the slot as `create_slot` does, on a server of this version."""
    arguments = [f"'{name.replace(chr(39), chr(39) * 2)}'", f"'{PLUGIN}'", "false", "false"]
    if version >= _FAILOVER_SINCE and failover != "off":
        arguments.append("true" if failover == "on" else "NOT pg_is_in_recovery()")
    return f"SELECT pg_create_logical_replication_slot({', '.join(arguments)})"


def create_slot(
    connection: Connection, name: str, failover: Literal["auto", "on", "off"] = "auto", patience: float | None = None
) -> SlotState:
    """A permanent `pgoutput` slot in the connection's database; waits for the transactions that are open now, for
    `patience` seconds (then `Transient`, code "old_transactions", names them), or as long as the session's
    `statement_timeout` lets it (code "timeout"). Then nothing is left.

    `auto` makes it a failover slot where the server can: since 17, on a primary.
    """
    if failover == "on" and connection.info.server_version < _FAILOVER_SINCE:
        raise Refused(
            "failover slots need PostgreSQL 17 or newer",
            code="no_failover_slots",
            where=_where(name),
            remedy="set source.failover to auto or off",
        )
    if patience is not None:
        with _bounded(connection, name, patience):
            return create_slot(connection, name, failover)
    with errors_named(_where(name)):
        try:
            connection.execute(create_statement(name, connection.info.server_version, failover))
            refusal = None
        except (
            server_errors.DuplicateObject,
            server_errors.InvalidName,
            server_errors.ConfigurationLimitExceeded,
            server_errors.ObjectNotInPrerequisiteState,
            server_errors.FeatureNotSupported,
        ) as error:
            refusal = _refusal(error, name)
    if refusal is not None:
        raise refusal
    created = read_slot(connection, name)
    assert created is not None
    return created


@contextlib.contextmanager
def _bounded(connection: Connection, name: str, patience: float) -> Iterator[None]:
    """Behind the end of the transactions that are open now; inside the block those that have begun since may take what
    is left of the time, and the server's process ends with us: it would wait on for nobody, and hold the slot."""
    deadline = time.monotonic() + patience
    wait_for_old_transactions(connection, 0, patience, where=_where(name))
    with errors_named(_where(name)):
        row = connection.execute("select current_setting('statement_timeout')").fetchone()
    assert row is not None
    left = max(deadline - time.monotonic(), 1.0)
    _set(connection, "statement_timeout", f"{round(left * 1000)}ms")
    with contextlib.suppress(server_errors.InvalidParameterValue):  # a server that cannot notice it
        _set(connection, "client_connection_check_interval", "2s")
    try:
        yield
    except Transient as late:
        if late.code == "timeout":
            wait_for_old_transactions(connection, 0, 0, where=_where(name))  # which names them
        raise
    finally:
        if not connection.closed:
            _set(connection, "statement_timeout", row[0])


def _set(connection: Connection, setting: str, value: str) -> None:
    connection.execute("select set_config(%s, %s, false)", [setting, value])


def drop_slot(connection: Connection, name: str) -> bool:
    """False when there was none. `LostLease` while somebody reads it: dropping would pull the log from under them."""
    busy = None
    with errors_named(_where(name)):
        try:
            dropped = connection.execute(
                "select pg_drop_replication_slot(slot_name) from pg_replication_slots where slot_name = %s", (name,)
            ).fetchone()
        except server_errors.UndefinedObject:  # gone between the two halves of the query
            dropped = None
        except server_errors.ObjectInUse as error:
            dropped, busy = None, error.diag.message_primary or "the slot is in use"
    if busy is not None:
        raise LostLease(busy, where=_where(name), remedy="stop the replicate that reads it, then try again")
    return dropped is not None


_REFUSALS = {
    "42710": ("slot_exists", "use another name for source.slot, or drop the slot if nobody needs it"),
    "42602": ("bad_slot_name", "use lower-case letters, digits and underscores for source.slot"),
    "53400": ("no_slot_room", "raise max_replication_slots and restart the server, or drop a slot that nobody needs"),
    "55000": ("source_settings", "set wal_level = logical and restart the server"),
}


def _refusal(error: Exception, name: str) -> Refused:
    state = getattr(error, "sqlstate", "") or ""
    message = getattr(getattr(error, "diag", None), "message_primary", None) or "the server refused to create the slot"
    code, remedy = _REFUSALS.get(state, ("source_settings", "see the server's message"))
    return Refused(message, code=code, where=_where(name), remedy=remedy)


def _invalidation(row: dict[str, Any]) -> str | None:
    """17 names the reason; 16 tells only that a standby's slot was in conflict; before, only lost WAL ends a slot."""
    if row.get("invalidation_reason"):
        return str(row["invalidation_reason"])
    if row.get("conflicting"):
        return "conflicting"
    return "wal_removed" if row["wal_status"] == "lost" else None


def _lsn(text: str | None) -> int | None:
    return None if text is None else parse_lsn(text)


def _where(name: str) -> str:
    return f"replication slot {name}"
