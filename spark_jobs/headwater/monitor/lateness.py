"""Which tables of a pipeline are further behind than its file allows them (`freshness`), for an alarm before somebody
waits. Starts without Spark; asks the source where it stands, and writes nothing there."""

from __future__ import annotations

from contextlib import closing
from datetime import datetime
from typing import Any

from headwater.lake.reader import LakeReader
from headwater.monitor.lags import Lags
from headwater.names import TableName
from headwater.pipeline_file.pipeline import Pipeline
from headwater.source.connection import connect
from headwater.waiting.source_state import STATEMENT_SECONDS, as_the_source_stands, followed, read_source_state

Late = dict[str, dict[str, Any]]
"""By table: `lag_seconds`, `freshness_seconds`, and `state`, `reason`, `remedy` as `status` shows them."""

_SAMPLES = 1000


class Lateness:
    """Looks at one pipeline again and again. Its own samples of the source stand in for those of a driver that lives
    too shortly to take any. Not thread-safe."""

    def __init__(self) -> None:
        self._samples: list[tuple[datetime, int]] = []
        self._log: tuple[str, int] | None = None
        self._unpublished: dict[str, datetime] = {}

    def look(self, pipeline: Pipeline) -> Late:
        """The tables that are late now. SourceUnreachable, other Transient, or Refused: then nothing is known."""
        lake = LakeReader(pipeline.lake_path(), pipeline.name)
        look = lake.look()
        tables = followed(lake.registry(), pipeline.source.publication)
        session = connect(pipeline.conninfo(), application_name="headwater alarm", statement_timeout=STATEMENT_SECONDS)
        with closing(session) as connection:
            source = read_source_state(connection, pipeline, tables, look_only=True).asked_behind(look)
        look = as_the_source_stands(look, source, lambda: tables)
        versions = lake.epoch(look.file.epoch).tables if look.file is not None and look.file.epoch else {}
        if source.log != self._log:  # the same numbers are other places there
            self._samples, self._log = [], source.log
        self._samples += source.samples(source.log)
        if len(self._samples) > _SAMPLES:
            self._samples[: _SAMPLES // 2] = self._samples[: _SAMPLES // 2 : 2]
        # No epoch says how far such a table is, and none may ever come: it counts from when it was first seen.
        self._unpublished = {
            name: self._unpublished.get(name, source.sample[0])
            for name, table in look.tables.items()
            if name not in versions and table.state not in ("new", "loading", "removed")
        }
        lags, found = Lags(look, source, self._samples), Late()
        for name, table in sorted(look.tables.items()):
            if table.state == "removed":
                continue
            allowed, seconds = pipeline.freshness_of(TableName.parse(name)), None
            if name in versions:
                seconds = lags.least_seconds(name, versions[name].applied_lsn)
            elif name in self._unpublished:
                seconds = round((source.now() - self._unpublished[name]).total_seconds(), 3)
            if allowed is not None and seconds is not None and seconds > allowed:
                found[name] = {
                    "lag_seconds": seconds,
                    "freshness_seconds": allowed,
                    "state": table.state,
                    "reason": table.reason,
                    "remedy": table.remedy,
                }
        return found
