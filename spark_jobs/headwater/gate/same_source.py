"""Whether a connection leads to the server, and the timeline, that the lake was built from."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING, Final

from headwater.errors import SourceChanged
from headwater.lake.registry import PipelineRecord
from headwater.pipeline_file.pipeline import Pipeline
from headwater.position import format_lsn
from headwater.source.connection import Connection, ServerIdentity, identify, position_now
from headwater.source.stream import LogStream

if TYPE_CHECKING:
    from headwater.lake.ledger import Epoch

NEW_SOURCE: Final = (
    "connect to the server the lake was built from; or, if this is the source from now on, headwater verify "
    "PIPELINE.yaml --repair --new-source compares, and writes only what differs, and headwater load PIPELINE.yaml "
    "--again --new-source loads all tables again"
)
REPLICATE_SAYS: Final = (
    "connect to the server the lake was built from; or, if this is the source from now on, headwater replicate "
    "PIPELINE.yaml goes on, or says what to do"
)


def described(one: PipelineRecord | ServerIdentity) -> str:
    """For messages: which log it is."""
    return f"system {one.system_id} timeline {one.timeline}"


def log_ends_before(end: int, lake: int) -> str:
    """For messages: why nothing that the source says compares with the lake."""
    return (
        f"the source's log ends at {format_lsn(end)}, before the lake's {format_lsn(lake)}: it was restored from an "
        "older state"
    )


def history_of(pipeline: Pipeline, now: ServerIdentity) -> tuple[tuple[int, int], ...]:
    """The timelines that the source's own comes from, oldest first, each with the LSN at which it ended."""
    if now.timeline == 1:
        return ()
    with contextlib.closing(LogStream(pipeline.conninfo())) as stream:
        return tuple(sorted(stream.switch_points(now.timeline).items()))


def require_same_source(
    connection: Connection, pipeline: Pipeline, known: PipelineRecord, newest: Epoch | None = None
) -> ServerIdentity:
    """Who answered. SourceChanged when it is not the source that `known` tells of, or when its log has not come as far
    as `newest`, the lake's: only what was on its disk was ever sent."""
    now = identify(connection)
    if (now.system_id, now.timeline) != (known.system_id, known.timeline):
        raise SourceChanged(
            f"the lake was built from {described(known)}, this source is {described(now)}",
            where="source.connection",
            remedy=REPLICATE_SAYS,
        )
    # Two standbys that are promoted apart give the same number to timelines that have nothing in common.
    if known.history and history_of(pipeline, now) != known.history:
        raise SourceChanged(
            f"the lake was built from {described(known)}, and this source's timeline of that number comes from "
            "elsewhere: another standby was promoted, or a backup restored, apart from the one that was followed",
            where="source.connection",
            remedy=NEW_SOURCE,
        )
    if newest is not None and (newest.position.system_id, newest.position.timeline) != (now.system_id, now.timeline):
        raise SourceChanged(
            f"the lake's newest position is one of system {newest.position.system_id} timeline "
            f"{newest.position.timeline}, this source is {described(now)}: a change to another source has not ended",
            where="source.connection",
            remedy=NEW_SOURCE,
        )
    end = position_now(connection).lsn
    if newest is not None and not now.in_recovery and end < newest.position.lsn:
        raise SourceChanged(
            log_ends_before(end, newest.position.lsn),
            where="source.connection",
            remedy=NEW_SOURCE,
        )
    return now
