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
from dataclasses import replace
from datetime import timedelta
from typing import Any, Literal

from headwater.errors import Refused
from headwater.lake.cuts import Cut
from headwater.lake.looks import Growing, often
from headwater.lake_root import is_remote
from headwater.names import TableName
from headwater.pipeline_file.pipeline import Pipeline, load_pipeline
from headwater.pipeline_file.quantities import parse_duration
from headwater.waiting.kept_readers import borrowed
from headwater.waiting.lookout import Lookout
from headwater.waiting.on_timeout import instead_of_cut
from headwater.waiting.request import WaitRequest, asked
from headwater.waiting.result import WaitResult
from headwater.waiting.waiter import Waiter

Wanted = str | os.PathLike[str] | Pipeline | Mapping[str, Any]

log = logging.getLogger(__name__)

_OUTAGE_SECONDS = 1.0
_FIRST_WORD_SECONDS, _WORD_SECONDS = 2.0, 30.0


def wait(pipeline: Pipeline, request: WaitRequest) -> WaitResult:
    """The command `headwater wait`: blocks until the wait has ended, about at the request's deadline. While it waits it
    says why, in the log."""
    root = pipeline.lake_path()
    with borrowed(root, pipeline.name) as lake:
        lookout = Lookout(pipeline, lake)
        waiter = Waiter(pipeline, request, lookout)
        looks = Growing(*often(root).wait)
        next_word = time.monotonic() + _FIRST_WORD_SECONDS
        while True:
            outage, result = "", None
            try:
                result = waiter.look()
            except OSError as error:
                # A store may come back, and lets nobody in by waiting.
                if request.remaining() <= 0 or not is_remote(root) or isinstance(error, PermissionError):
                    raise
                outage = f"the lake cannot be read: {error.strerror or error}"
            if result is not None:
                return result
            if time.monotonic() >= next_word:
                next_word = time.monotonic() + _WORD_SECONDS
                log.info("pipeline %s, %s", pipeline.name, outage or waiter.progress)
            time.sleep(_OUTAGE_SECONDS if outage else min(looks.pause, max(request.remaining(), 0.01)))
            looks.looked(new=False)
            lookout.refresh()


def requested_here(
    pipeline: Pipeline,
    require: object,
    timeout: float,
    tables: Iterable[str | TableName] | None = None,
    partitions: Mapping[str, str | Sequence[str]] | None = None,
) -> WaitRequest:
    """What this process asks for, in its own name; see `asked`."""
    host = socket.gethostname()
    by = {"owner": f"wait {host}:{os.getpid()}", "who": f"wait on {host}"}
    return asked(require, timeout, tables, partitions, keep=pipeline.lake.keep_cuts, **by)


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
    request = requested_here(loaded, require, seconds(timeout), tables, partitions)
    request = replace(
        request, ignore_suspended=ignore_suspended, give_up_early=on_timeout == "fallback", validated=validated
    )
    result = wait(loaded, request)
    if result.cut is not None:
        return result.cut
    instead = instead_of_cut(loaded, result.to_json(), on_timeout, request)
    if instead is None:
        raise result.error()
    log.warning("pipeline %s: %s; going on %s", loaded.name, result.error().message, instead["instead"])
    return instead


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
