"""Which tables of a pipeline are further behind than its file allows them (`freshness`), for an alarm before somebody
waits. Starts without Spark; asks the source where it stands, and writes nothing there."""

from __future__ import annotations

from contextlib import closing
from typing import Any

from headwater.config import Pipeline
from headwater.jobs.lags import Lags
from headwater.jobs.source_state import STATEMENT_SECONDS, as_the_source_stands, followed, read_source_state
from headwater.lake.status import LakeReader
from headwater.names import TableName
from headwater.source.connection import connect

Late = dict[str, dict[str, Any]]
"""By table: `lag_seconds`, `freshness_seconds`, and `state`, `reason`, `remedy` as `status` shows them."""


def late_tables(pipeline: Pipeline) -> Late:
    """Those that are late now. SourceUnreachable, other Transient, or Refused: then nothing is known."""
    lake = LakeReader(pipeline.lake_path(), pipeline.name)
    look = lake.look()
    tables = followed(lake.registry(), pipeline.source.publication)
    session = connect(pipeline.conninfo(), application_name="headwater alarm", statement_timeout=STATEMENT_SECONDS)
    with closing(session) as connection:
        source = read_source_state(connection, pipeline, tables, look_only=True)
    look = as_the_source_stands(look, source, lambda: tables)
    versions = lake.epoch(look.file.epoch).tables if look.file is not None and look.file.epoch else {}
    lags, found = Lags(look, source), Late()
    for name, table in sorted(look.tables.items()):
        allowed = pipeline.freshness_of(TableName.parse(name))
        version = versions.get(name)
        _, seconds = lags.of_table(name, version.applied_lsn if version is not None else None)
        if allowed is not None and seconds is not None and seconds > allowed:
            found[name] = {
                "lag_seconds": seconds,
                "freshness_seconds": allowed,
                "state": table.state,
                "reason": table.reason,
                "remedy": table.remedy,
            }
    return found
