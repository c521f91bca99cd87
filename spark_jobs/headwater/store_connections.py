"""Stores that an Airflow connection tells the way into (`lake.airflow`).

The engine knows no Airflow. What a connection says comes as a text of JSON, which is secret: from the operator that
starts a job, in an environment variable; in processes of Airflow's own (tasks, triggerer, API server), which live on
while keys change, by asking whoever has said `fetch_by`. Its words: `endpoint`, `region`, `secrets` by the names that
obstore has for them, and `good_until`, in seconds since 1970, of keys that expire.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from headwater import store_options
from headwater.errors import Refused
from headwater.store_options import StoreOptions, refuse_foreign_secrets, seconds_good

_fetch: Callable[[str], str] | None = None


def store_variable(conn_id: str) -> str:
    """The environment variable in which an operator hands over what the Airflow connection says."""
    return "HEADWATER_STORE_" + re.sub(r"[^A-Z0-9]", "_", conn_id.upper())


def fetch_by(fetch: Callable[[str], str]) -> None:
    """From now on this process asks `fetch` for the text of a connection, from any thread; it raises HeadwaterError."""
    global _fetch
    _fetch = fetch


def enter(root: str, conn_id: str, given: StoreOptions, handed_over: str, where: str) -> None:
    """Let this process reach the lake at `root` by what the connection says, and before that by what the pipeline file
    says itself (`given`). `handed_over`: its text, if an operator has. Refused when there is none to be had."""
    if handed_over:
        options, _ = _read(handed_over, conn_id, given, where)
        store_options.register(root, options)
    elif _fetch is not None:
        store_options.register_renewed(root, (conn_id, given), partial(_fetched, conn_id, given, where))
    else:
        variable = store_variable(conn_id)
        raise Refused(
            f"the lake's keys are those of the Airflow connection {conn_id}, but {variable} is not set",
            code="bad_configuration",
            where=where,
            remedy="run it by the pipeline's DAG; or take lake.airflow out of the file here, and give the keys by the "
            "environment or by lake.storage",
        )


def _fetched(conn_id: str, given: StoreOptions, where: str) -> tuple[StoreOptions, float]:
    assert _fetch is not None
    return _read(_fetch(conn_id), conn_id, given, where)


def _read(text: str, conn_id: str, given: StoreOptions, where: str) -> tuple[StoreOptions, float]:
    """The options, and for how many seconds they are good."""
    try:
        said: dict[str, Any] = json.loads(text)
        secrets = dict(given.secrets) or {str(name): str(value) for name, value in said["secrets"].items()}
        good_until = said.get("good_until")
        seconds = seconds_good(None if good_until is None else float(good_until))
    except (ValueError, TypeError, KeyError, AttributeError):
        raise Refused(
            "what was handed over of the lake's Airflow connection is not what Headwater's operators hand over",
            code="bad_configuration",
            where=where,
            remedy="let the pipeline's DAG start the job, or unset the variable HEADWATER_STORE_...",
        ) from None
    refuse_foreign_secrets(secrets, f"the Airflow connection {conn_id}", where)
    options = replace(
        given,
        endpoint=given.endpoint or str(said.get("endpoint") or ""),
        region=given.region or str(said.get("region") or ""),
        secrets=tuple(sorted(secrets.items())),
    )
    return options, seconds
