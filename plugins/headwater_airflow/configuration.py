"""The section `[headwater]` of Airflow's configuration: where pipeline files lie, and how long slices are.

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


def _setting(name: str, variable: str, default: str) -> str:
    from airflow.sdk.configuration import conf

    return os.environ.get(variable) or str(conf.get("headwater", name, fallback=default))
