"""Waits in the metrics that Airflow itself sends, by StatsD or OpenTelemetry: counted where a wait ends, once.

The outcome is in the metric's name, since plain StatsD knows no tags.
"""

from __future__ import annotations

import logging
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

log = logging.getLogger(__name__)


def count_wait(pipeline: str, event: dict[str, Any], *, in_trigger: bool = False) -> None:
    """`pipeline`: its file; `event`: the wait's JSON, or an error's. What cannot be counted fails nothing."""
    try:
        stats: Any = import_module("airflow.observability.stats" if in_trigger else "airflow.sdk.observability.stats")
        tags = {"pipeline": str(event.get("pipeline") or Path(pipeline).stem)}
        stats.incr(f"headwater_wait.{event.get('outcome') or 'refused'}", tags=tags)
        if event.get("waited_seconds") is not None:
            stats.timing("headwater_wait.duration", timedelta(seconds=event["waited_seconds"]), tags=tags)
    except Exception as error:
        log.info("the wait is not counted in Airflow's metrics: %s", error)
