"""One short visit of a waiting reader to the source: where its log ends, what its clock says, does the driver live.

The position is asked first and the marker written after it: the marker lies at or above the position, is flushed,
and seals the driver's open batch, so whoever waits for the position is served at once, also where nothing else
writes. Where no marker can be written (a standby, no right) the driver's own pace is the bound.
"""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass
from datetime import datetime, timedelta

from headwater.errors import Refused
from headwater.position import Position
from headwater.source.connection import Connection, connect, identify
from headwater.source.samples import emit_marker, insert_position, take_sample
from headwater.source.slot import SlotState, read_slot

STATEMENT_SECONDS = 5.0
_NO_MARKER = frozenset({"cannot_mark", "not_authorised"})


@dataclass(frozen=True, slots=True)
class SourceState:
    """What the source answered. `asked_at`: this process's monotonic clock just before its clock was asked."""

    position: Position
    in_recovery: bool
    sample: tuple[datetime, int]
    asked_at: float
    slot: SlotState | None

    def now(self) -> datetime:
        """The source's clock, carried on by our own; never behind it by more than the drift of the two clocks,
        since the way of the answer is counted as passed: a staleness is rather over- than underrated."""
        return self.sample[0] + timedelta(seconds=time.monotonic() - self.asked_at)


def ask_source(conninfo: str, slot: str) -> SourceState:
    """Connect, ask, write a marker, and leave. SourceUnreachable, other Transient, or Refused."""
    session = connect(
        conninfo,
        application_name="headwater wait",
        statement_timeout=STATEMENT_SECONDS,
        lock_timeout=STATEMENT_SECONDS,
    )
    with closing(session) as connection:
        state = read_source_state(connection, slot)
        try:
            emit_marker(connection)
        except Refused as error:
            if error.code not in _NO_MARKER:
                raise
        return state


def read_source_state(connection: Connection, slot: str) -> SourceState:
    """The answers alone: nothing is written."""
    in_recovery = identify(connection).in_recovery
    position = insert_position(connection)
    asked_at = time.monotonic()
    sample = take_sample(connection)
    return SourceState(position, in_recovery, (sample.time, sample.lsn), asked_at, read_slot(connection, slot))
