"""Whether a connection leads to the server, and the timeline, that the lake was built from."""

from __future__ import annotations

from typing import Final

from headwater.errors import SourceChanged
from headwater.lake.registry import PipelineRecord
from headwater.source.connection import Connection, ServerIdentity, identify

CONNECT_THERE: Final = "connect to the server the lake was built from"


def require_same_source(connection: Connection, known: PipelineRecord, remedy: str = CONNECT_THERE) -> ServerIdentity:
    """Who answered. SourceChanged when it is not the source that `known` tells of."""
    now = identify(connection)
    if (now.system_id, now.timeline) != (known.system_id, known.timeline):
        raise SourceChanged(
            f"the lake was built from system {known.system_id} timeline {known.timeline}, this source is system "
            f"{now.system_id} timeline {now.timeline}",
            where="source.connection",
            remedy=remedy,
        )
    return now
