"""`headwater.wait_all`: the cuts of several pipelines in one call, waited for beside each other."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from headwater.lake.cuts import Cut
from headwater.pipeline_file.pipeline import Pipeline, load_pipeline
from headwater.waiting.wait import wait_for_cut

Wanted = str | os.PathLike[str] | Pipeline | Mapping[str, Any]


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
