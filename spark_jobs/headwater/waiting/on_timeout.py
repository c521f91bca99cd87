"""What a caller gets who asked to go on although the wait was not satisfied.

`continue`: the newest cut of the wanted tables as it stands, and how stale it is. `fallback`: a cut that names no
versions, and of which `headwater.read` reads every table at the source. Only where that helps: a refusal stays one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

from headwater.errors import Refused, Transient
from headwater.lake.cuts import AT_SOURCE, Cut, pin_cut, take_cut, time_text, with_parts
from headwater.lake.freshness import Outcome
from headwater.lake.look import IN_STEP, complete_until
from headwater.lake.reader import LakeReader
from headwater.pipeline_file.pipeline import Pipeline
from headwater.source.catalog.standing import Registered
from headwater.waiting.request import WaitRequest, deadline_in
from headwater.waiting.source_state import SourceState, as_the_source_stands, ask_source, followed
from headwater.waiting.target import wanted_tables
from headwater.waiting.wanted_partitions import ask_parts

_CONTINUED = (
    Outcome.TIMED_OUT,
    Outcome.NOT_RUNNING,
    Outcome.PAUSED,
    Outcome.SOURCE_UNREACHABLE,
    Outcome.NOT_VALIDATED,
)
# A table that is suspended or loading in the lake is whole at the source.
_FALLEN_BACK = (Outcome.TIMED_OUT, Outcome.NOT_RUNNING, Outcome.PAUSED, Outcome.SUSPENDED, Outcome.LOADING)


def instead_of_cut(pipeline: Pipeline, ended: Mapping[str, Any], on_timeout: str, request: WaitRequest) -> Cut | None:
    """For `on_timeout` continue or fallback: a cut, with `ended` (a wait's JSON) in short and a sentence, `instead`.

    None when the outcome is none that it helps against.
    """
    outcome = ended.get("outcome")
    short = {name: ended.get(name) for name in ("outcome", "target", "waited_seconds", "reason")}
    if on_timeout == "continue" and outcome in _CONTINUED:
        return {**_as_it_stands(pipeline, request), **short}
    # Nobody has validated the source: who wants tables validated is not served by it.
    if on_timeout == "fallback" and outcome in _FALLEN_BACK and not ended.get("validated"):
        return {**_at_the_source(pipeline, request), **short}
    return None


def _as_it_stands(pipeline: Pipeline, request: WaitRequest) -> Cut:
    """The newest cut, pinned. `complete_until`: everything committed before that moment is in it, by the source's
    clock; `staleness_seconds`: how long ago that is. Null where it is not known."""
    root = pipeline.lake_path()
    lake = LakeReader(root, pipeline.name)
    look = lake.look()
    names = wanted_tables(pipeline, request.tables, look)

    def followed_now() -> list[Registered]:
        return followed(lake.registry(), pipeline.source.publication, names)

    source: SourceState | None = None
    with contextlib.suppress(Transient):  # without the source: what was known when the lake was written
        source = ask_source(pipeline, followed_now()).asked_behind(look)
    look = as_the_source_stands(look, source, followed_now)
    if look.file is None or not look.file.epoch:
        raise Refused(
            "no epoch has been published yet: there is no cut to go on with",
            code="no_epoch",
            where=f"pipeline {pipeline.name}",
            remedy="headwater replicate PIPELINE.yaml --until now",
        )
    epoch = lake.epoch(look.file.epoch)
    in_step = [name for name in names if name in look.tables and look.tables[name].state == IN_STEP]
    lsn = min(map(look.covered, in_step), default=epoch.position.lsn)
    parts = ask_parts(pipeline, lake.registry(), request.partitions)
    cut = with_parts(take_cut(root, pipeline.name, look, epoch, names, lsn), parts)
    pin = pin_cut(root, cut, request.owner, deadline_in(request.keep))
    if source is not None and not source.is_of(look.log):
        source = None  # of another log: neither its clock nor its positions say how old this lake is
    complete = complete_until(look.file, lsn, [source.sample] if source is not None else ())
    stale = round((source.now() - complete).total_seconds(), 3) if source is not None and complete else None
    how = f"{stale:.1f} s old" if stale is not None else "how old it is the source could not be asked"
    return {
        **cut,
        "complete_until": time_text(complete) if complete is not None else None,
        "staleness_seconds": stale,
        "pin": {"id": pin.id, "expiry": time_text(pin.expiry)},
        "instead": f"with the newest cut as it stands, epoch {epoch.epoch} ({how})",
    }


def _at_the_source(pipeline: Pipeline, request: WaitRequest) -> Cut:
    lake = LakeReader(pipeline.lake_path(), pipeline.name)
    names = wanted_tables(pipeline, request.tables, lake.look())
    entry = {"path": None, "version": None, "applied_lsn": None, "state": AT_SOURCE}
    cut = {
        "pipeline": pipeline.name,
        "epoch": None,
        "position": None,
        "source_time": None,
        "tables": {name: dict(entry) for name in names},
        "fallback": {"pipeline_file": pipeline.file, "repeatable": False},
        "instead": "with the source: whoever reads this cut reads its tables there, as they are then; not repeatable",
    }
    return with_parts(cut, ask_parts(pipeline, lake.registry(), request.partitions))
