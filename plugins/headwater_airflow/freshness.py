"""Waiting inside a task, with the pipeline's Airflow connection: `from headwater_airflow import freshness`.

    cut = freshness.wait("/etc/headwater/shop.yaml", tables=["public.orders"], require="now")

It keeps its worker slot while it waits; a FreshnessSensor does not. Where there is no Airflow, in a notebook for
example, `headwater.wait` does the same; a connection that the pipeline file leaves to Airflow is then taken from the
environment variable that the operators set, here as well as there.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any, Literal

from headwater_airflow.hooks.source import connection_environment
from headwater_airflow.hooks.store import fetch_in_task


def wait(
    pipeline: str | os.PathLike[str],
    *,
    tables: Iterable[str] | None = None,
    require: Any = "now",
    max_wait: float | str | timedelta = 300,
    on_timeout: Literal["fail", "continue", "fallback"] = "fail",
    ignore_suspended: bool = False,
    validated: bool = False,
    partitions: Mapping[str, str | Sequence[str]] | None = None,
) -> dict[str, Any]:
    """The pinned cut, as `headwater.wait` gives it, or `headwater.NotFresh`. The arguments are the sensor's, without
    `keep_cut`: it is kept as any cut is, for `lake.keep_cuts`."""
    from headwater.pipeline_file.pipeline import load_pipeline
    from headwater.pipeline_file.values import connection_variable
    from headwater.waiting.wait import wait_for_cut

    fetch_in_task()
    loaded = load_pipeline(pipeline)
    conn_id = loaded.source.airflow_connection
    if conn_id is not None and connection_variable(conn_id) not in os.environ:
        loaded = load_pipeline(pipeline, {**os.environ, **connection_environment(conn_id)})
    return wait_for_cut(
        loaded,
        tables=tables,
        require=require,
        timeout=max_wait,
        ignore_suspended=ignore_suspended,
        on_timeout=on_timeout,
        validated=validated,
        partitions=partitions,
    )
