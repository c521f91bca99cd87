"""Leases: which job may work on the lake just now. A lease is a registry record whose life is its holder's session at
the source: no clock, no expiry; a killed holder's session ends, and with it the lease.

Loads and replicate run beside each other, but for the set-up: publications and slot are made while no driver starts.
Replicate's own exclusion is the slot; a load first writes the lease of its set-up, then looks at the slot, and
replicate first takes the slot, then looks at that lease: whoever comes second sees the first.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import socket
from collections.abc import Iterator
from dataclasses import replace

from headwater.errors import LostLease
from headwater.lake.registry import Lease, Registry, now_text
from headwater.source.connection import Connection, connect, errors_named

LOAD = "load"
SET_UP = "load's set-up"
MAINTAIN = "maintain"
COMPACTION = "compaction"


@contextlib.contextmanager
def hold(conninfo: str, registry: Registry, name: str) -> Iterator[Lease]:
    """Hold the lease `name` inside the block; LostLease when another job has it."""
    holder = secrets.token_hex(8)
    session = f"headwater {name} {holder}"
    with contextlib.closing(connect(conninfo, application_name=session)) as connection:
        lease = Lease(name, holder, session, socket.gethostname(), os.getpid(), now_text())

        def taken(known: Lease | None) -> Lease:
            _refuse(connection, known)
            return lease

        def released(known: Lease | None) -> Lease | None:
            # Our session may have been cut, and another job have taken over since.
            return replace(lease, session="") if known == lease else None

        registry.refresh()
        registry.change_lease(name, taken)
        try:
            yield lease
        finally:
            registry.change_lease(name, released)


def is_held(connection: Connection, registry: Registry, name: str) -> bool:
    """Whether the lease `name` is alive."""
    registry.refresh()
    return _lives(connection, registry.leases.get(name))


def refuse_if_held(connection: Connection, registry: Registry, name: str) -> None:
    """LostLease, naming the holder, when the lease `name` is alive."""
    registry.refresh()
    _refuse(connection, registry.leases.get(name))


def _refuse(connection: Connection, lease: Lease | None) -> None:
    if lease is not None and _lives(connection, lease):
        raise LostLease(
            f"a {lease.name} is running since {lease.taken_at} (host {lease.host}, process {lease.pid})",
            where=f"lease {lease.name}",
            remedy="wait until it ends, or stop it",
        )


def _lives(connection: Connection, lease: Lease | None) -> bool:
    return lease is not None and is_alive(connection, lease.session)


@errors_named("source")
def is_alive(connection: Connection, session: str) -> bool:
    """Whether the session of this application_name is there; never for an empty one, of a lease that was let go: the
    server's own processes have no application_name either."""
    if not session:
        return False
    found = "select from pg_catalog.pg_stat_activity where application_name = %s"
    return connection.execute(found, [session]).rowcount > 0
