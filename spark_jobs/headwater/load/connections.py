"""How many sessions read at the source at once: what the pipeline file says, or, where it says `auto`, what the source,
the cores and the file's ceiling bear."""

from __future__ import annotations

import logging
import multiprocessing
from typing import TYPE_CHECKING, Final

from headwater.pipeline_file.pipeline import Pipeline
from headwater.source.connection import Connection, errors_named
from headwater.spark.session import cores_of

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

log = logging.getLogger(__name__)

_SESSIONS_EACH: Final = 4
"""Where many small tables are read side by side each has one that reads, one that looks at the catalog, and two of the
table's own."""
_SHARE: Final = 2
"""Of what is free every second session is left to others."""
_OTHERS: Final = """
select least(
         current_setting('max_connections')::int - current_setting('superuser_reserved_connections')::int
           - coalesce(current_setting('reserved_connections', true), '0')::int - count(*),
         case when d.datconnlimit >= 0 then d.datconnlimit - count(*) filter (where a.datid = d.oid) end,
         case when r.rolconnlimit >= 0 then r.rolconnlimit - count(*) filter (where a.usesysid = r.oid) end)
  from pg_catalog.pg_stat_activity a, pg_catalog.pg_database d, pg_catalog.pg_roles r
 where a.datid is not null and d.datname = current_database() and r.rolname = current_user
 group by d.datconnlimit, r.rolconnlimit
"""


def connections_for(pipeline: Pipeline, connection: Connection, spark: SparkSession | None) -> int:
    """So many may read. `spark`: whose tasks do it; None: threads of this process."""
    said = pipeline.load.connections
    if said != "auto":
        return said
    most = pipeline.load.max_connections
    cores = cores_of(spark) if spark is not None else multiprocessing.cpu_count()
    free = free_sessions(connection)
    found = max(1, min(most, cores or most, free // (_SHARE * _SESSIONS_EACH)))
    shown = f"{cores} cores" if cores else "a cluster that does not say how many cores it has"
    log.info("%d sessions read: %s, room for %d sessions at the source, at most %d", found, shown, free, most)
    return found


def free_sessions(connection: Connection) -> int:
    """How many more the source lets this role have, in this database."""
    with errors_named("source"):
        row = connection.execute(_OTHERS).fetchone()
    assert row is not None, "this session is one of them"
    return max(0, int(row[0]))
