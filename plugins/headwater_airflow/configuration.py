"""The section `[headwater]` of Airflow's configuration: where pipeline files lie, how long slices are, and
where Spark tells of jobs that have ended.

The variables HEADWATER_... of the environment go before it: they may differ from one service to another.
"""

from __future__ import annotations

import os

PIPELINES = "HEADWATER_PIPELINES"


def pipelines_folder() -> str | None:
    """The folder of pipeline files; None: nobody has named one."""
    return _setting("pipelines", PIPELINES, "") or None


def slice_seconds() -> float:
    return float(_setting("slice_seconds", "HEADWATER_SLICE_SECONDS", "600"))


def warm_up_seconds() -> float:
    return float(_setting("warm_up_seconds", "HEADWATER_WARM_UP_SECONDS", "60"))


def spark_history_server() -> str | None:
    """The address of Spark's history server; None: nobody has named one."""
    return _setting("spark_history_server", "HEADWATER_SPARK_HISTORY_SERVER", "").rstrip("/") or None


def _setting(name: str, variable: str, default: str) -> str:
    from airflow.sdk.configuration import conf

    return os.environ.get(variable) or str(conf.get("headwater", name, fallback=default))
