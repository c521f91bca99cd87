"""Wait until the lake is fresh enough, and hand out the cut that is: for the shell, Python and tasks.

These block and pace the looks of a `headwater.waiting.waiter.Waiter`; sensor and trigger pace theirs by themselves. No
Spark.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any, Literal

from headwater.errors import Refused
from headwater.lake import freshness
from headwater.lake.cuts import Cut
from headwater.names import TableName
from headwater.pipeline_file.pipeline import Pipeline, load_pipeline
from headwater.pipeline_file.quantities import parse_duration
from headwater.waiting.kept_readers import borrowed
from headwater.waiting.lookout import Lookout
from headwater.waiting.result import WaitResult
from headwater.waiting.waiter import Asker, Waiter

Wanted = str | os.PathLike[str] | Pipeline | Mapping[str, Any]

log = logging.getLogger(__name__)

LOOK_SECONDS = 0.05
_FIRST_WORD_SECONDS, _WORD_SECONDS = 2.0, 30.0


def wait(
    pipeline: Pipeline,
    tables: Iterable[TableName] | None,
    require: object,
    timeout: float,
    ignore_suspended: bool = False,
    give_up_early: bool = False,
    validated: bool = False,
    partitions: Mapping[TableName, Sequence[TableName]] | None = None,
) -> WaitResult:
    """The command `headwater wait`: blocks until the wait has ended, at most about `timeout` seconds. While it waits it
    says why, in the log."""
    requirement = freshness.parse_requirement(require)
    with borrowed(pipeline.lake_path(), pipeline.name) as lake:
        lookout = Lookout(pipeline, lake)
        waiter = Waiter(
            pipeline,
            requirement,
            timeout=timeout,
            keep=pipeline.lake.keep_cuts,
            owner=_process(),
            tables=tables,
            ignore_suspended=ignore_suspended,
            give_up_early=give_up_early,
            validated=validated,
            partitions=partitions,
            lookout=lookout,
            asker=Asker(f"wait on {socket.gethostname()}", str(requirement)),
        )
        next_word = time.monotonic() + _FIRST_WORD_SECONDS
        while (result := waiter.look()) is None:
            if time.monotonic() >= next_word:
                next_word = time.monotonic() + _WORD_SECONDS
                log.info("pipeline %s, %s", pipeline.name, waiter.progress)
            time.sleep(LOOK_SECONDS)
            lookout.refresh()
    return result


def _process() -> str:
    return f"wait {socket.gethostname()}:{os.getpid()}"


def wait_for_cut(
    pipeline: str | os.PathLike[str] | Pipeline,
    *,
    tables: Iterable[str | TableName] | None = None,
    require: object = "now",
    timeout: float | str | timedelta = 60.0,
    ignore_suspended: bool = False,
    on_timeout: Literal["fail", "continue", "fallback"] = "fail",
    validated: bool = False,
    partitions: Mapping[str, str | Sequence[str]] | None = None,
) -> Cut:
    """`headwater.wait`: the pinned cut, or NotFresh. `tables` as SQL writes them; None: every table of the pipeline.
    `partitions`, by table: only these are wanted, leaves or subtrees, and the cut gives only their rows.

    `on_timeout`: with "continue" the newest cut as it stands, with "fallback" one that `headwater.read` reads at the
    source; either has `outcome` and `instead`, which says what it is (see `headwater.waiting.on_timeout`). `validated`:
    only a cut that has passed `headwater validate` is good enough; then not with "fallback": nobody validates the
    source.
    """
    from headwater.waiting.on_timeout import instead_of_cut
    from headwater.waiting.partitions import parse_partitions

    if on_timeout not in ("fail", "continue", "fallback"):
        raise Refused(
            f"{on_timeout!r} is none of fail, continue, fallback",
            code="bad_argument",
            where="on_timeout",
            remedy="give one of these",
        )
    if validated and on_timeout == "fallback":
        raise Refused(
            "validated and on_timeout=fallback exclude each other: nobody has validated the source",
            code="bad_argument",
            where="on_timeout",
            remedy="give one of fail, continue; or leave validated out",
        )
    loaded = pipeline if isinstance(pipeline, Pipeline) else load_pipeline(pipeline)
    names = [parse_table(name) for name in tables or ()]
    parts = parse_partitions(partitions, names)
    early = on_timeout == "fallback"
    result = wait(loaded, names, require, seconds(timeout), ignore_suspended, early, validated, parts)
    if result.cut is not None:
        return result.cut
    owner, keep = _process(), loaded.lake.keep_cuts
    instead = instead_of_cut(
        loaded, result.to_json(), on_timeout, tables=names, keep=keep, owner=owner, partitions=parts
    )
    if instead is None:
        raise result.error()
    log.warning("pipeline %s: %s; going on %s", loaded.name, result.error().message, instead["instead"])
    return instead


def parse_table(name: str | TableName) -> TableName:
    """A wanted table's name; Refused when it is none."""
    try:
        return name if isinstance(name, TableName) else TableName.parse(name)
    except ValueError as error:
        raise Refused(str(error), code="bad_name", where="tables", remedy="write schema.table, as SQL does") from None


def seconds(duration: float | str | timedelta) -> float:
    """A time to wait as a number; Refused when it is none."""
    if isinstance(duration, timedelta):
        duration = duration.total_seconds()
    with contextlib.suppress(ValueError):
        return parse_duration(duration)
    raise Refused(f"{duration!r} is no duration", code="bad_duration", where="timeout", remedy="give e.g. 60s or 5m")


def wait_for_cuts(pipelines: Iterable[Wanted], **arguments: Any) -> list[Cut]:
    """One pinned cut for each of `pipelines`, in their order; or, when all waits have ended, what the first of those
    that failed has raised (NotFresh, Refused): what was pinned for the others expires as any cut does.

    `arguments` are those of `headwater.wait`, for all; a mapping instead of a pipeline file says what one wants in
    their place, with its file as `pipeline`. Each source has a log of its own: all cuts hold what was committed before
    the call, and nothing orders their positions among each other.
    """
    each = [{**arguments, **(one if isinstance(one, Mapping) else {"pipeline": one})} for one in pipelines]
    loaded = [p if isinstance(p := one.pop("pipeline"), Pipeline) else load_pipeline(p) for one in each]
    with ThreadPoolExecutor(max(1, len(each)), thread_name_prefix="headwater-wait") as pool:
        waits = [pool.submit(wait_for_cut, known, **own) for known, own in zip(loaded, each, strict=True)]
    return [wait.result() for wait in waits]
