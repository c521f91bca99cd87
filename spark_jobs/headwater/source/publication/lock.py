"""DDL of our own, done so that the source never waits for it: a short lock time-out, a pause, and again.

ALTER PUBLICATION takes SHARE UPDATE EXCLUSIVE on the table: it lets readers and writers go on, but it queues behind
a running VACUUM or CREATE INDEX CONCURRENTLY, and other DDL queues behind it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from psycopg import errors as pg
from psycopg.pq import TransactionStatus

from headwater.errors import Transient
from headwater.names import TableName
from headwater.source.connection import Connection

# Above deadlock_timeout (1 s by default): only then does an autovacuum in our way give up for us.
LOCK_TIMEOUT_MS = 2000
PAUSE_SECONDS = 0.25

_HOLDERS = """
select distinct coalesce('process ' || l.pid || coalesce(' (' || nullif(a.application_name, '') || ')', '')
                         || coalesce(', in a transaction since ' || a.xact_start, ''), 'a prepared transaction')
from pg_catalog.pg_locks l left join pg_catalog.pg_stat_activity a on a.pid = l.pid
where l.granted and l.relation in (
      select c.oid from unnest(%s::text[], %s::text[]) as wanted(schema, name)
      join pg_catalog.pg_namespace n on n.nspname = wanted.schema
      join pg_catalog.pg_class c on c.relnamespace = n.oid and c.relname = wanted.name)
  and l.pid is distinct from pg_backend_pid()
  and l.mode not in ('AccessShareLock', 'RowShareLock', 'RowExclusiveLock')
"""


def run_with_lock_timeout(
    connection: Connection, names: Sequence[TableName], act: Callable[[], None], wait_seconds: float
) -> None:
    """Run `act` in a transaction of its own until its locks are granted; `Transient` after `wait_seconds`.

    `act` may run several times. The error names who holds the locks on `names`, as far as the role may see it.
    """
    if connection.info.transaction_status is not TransactionStatus.IDLE:
        raise ValueError("inside a transaction of the caller the change would not be committed on return")
    deadline = time.monotonic() + wait_seconds
    while True:
        try:
            with connection.transaction():
                connection.execute(f"set local lock_timeout = {LOCK_TIMEOUT_MS}")
                act()
            return
        except (pg.LockNotAvailable, pg.DeadlockDetected, pg.DuplicateObject) as reason:
            # DuplicateObject: another process added the same table first; `act` looks again.
            if time.monotonic() + PAUSE_SECONDS >= deadline:
                raise _not_granted(connection, names, wait_seconds) from reason
            time.sleep(PAUSE_SECONDS)


def _not_granted(connection: Connection, names: Sequence[TableName], wait_seconds: float) -> Transient:
    rows = connection.execute(_HOLDERS, [[n.schema for n in names], [n.name for n in names]]).fetchall()
    holders = "; ".join(holder for (holder,) in rows) or "not visible to this role"
    return Transient(
        f"no lock on {', '.join(str(name) for name in names)} within {wait_seconds:g} s (held by: {holders})",
        code="lock_timeout",
        where="publication",
        remedy="run the command again when that transaction has ended",
    )
