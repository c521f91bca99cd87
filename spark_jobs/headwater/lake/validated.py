"""Which validated cut satisfies a wait, and what is missing where none does: pure, as the verdict on freshness is.

A validation is of an epoch and the tables that it looked at. It counts for a wait when every table that must be
validated has passed there, as it is loaded now (a table that was loaded anew is another one), when the target is
met by that epoch's versions and position alone: what the lake holds beyond them nobody has looked at; and when every
table that is waited for was in step there, by the epoch's own row: what is in step now may have been suspended then.

Standard library only: Airflow's triggerer imports this.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING

from headwater.lake.freshness import Outcome, Verdict
from headwater.lake.look import Look
from headwater.position import Position, format_lsn

if TYPE_CHECKING:
    from headwater.lake.ledger import Epoch
    from headwater.lake.registry import TableRecord

_SHOWN = 3


@dataclass(frozen=True, slots=True)
class Checked:
    """A table in a validation. `position`: up to where it was exact; `failed`: the expectations of severity error."""

    success: bool
    incarnation: int
    position: Position
    sample: tuple[datetime, int] | None = None
    failed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ValidatedEpoch:
    """An epoch of which some tables were validated, each as its newest validation came out."""

    epoch: int
    tables: Mapping[str, Checked]

    def why_not(self, must: Sequence[str], records: Mapping[str, TableRecord]) -> str:
        """Why it does not count for the tables `must`; empty when it does."""
        left_out = [name for name in must if name not in self.tables]
        if left_out:
            return f"{', '.join(left_out[:_SHOWN])} was not validated there"
        for name in must:
            found = self.tables[name]
            if name not in records or found.incarnation != records[name].incarnation:
                return f"{name} was loaded again since"
            if not found.success:
                return f"{name} failed {', '.join(found.failed[:_SHOWN]) or 'it'}"
        return ""


Judge = Callable[[Look, Sequence[tuple[datetime, int]]], Verdict]
"""The verdict on a look, with samples beside those of its file."""


def judged_by_validation(
    fresh: Verdict,
    look: Look,
    must: Sequence[str],
    known: Sequence[ValidatedEpoch],
    records: Mapping[str, TableRecord],
    judge: Judge,
    row_of: Callable[[int], Epoch],
) -> Verdict:
    """`fresh`, the verdict on the lake as it is, turned into one on what was validated of it.

    Satisfied only with the epoch of a validation that every table in `must` passed and that meets the target. `known`:
    newest first. `row_of`: what the ledger says of an epoch.
    """
    if fresh.outcome not in (None, Outcome.SATISFIED) or look.file is None:
        return fresh
    required = list(fresh.tables)
    must = [name for name in must if name in fresh.tables]
    if not must:
        return fresh  # those that had to be validated are suspended, and left out
    below = ""
    for found in known:
        if found.why_not(must, records):
            continue
        checked = [found.tables[name] for name in must]
        log = look.file.position
        if not all(one.position.same_log(log) for one in checked):
            continue
        # A table that nobody looked at is exact at the epoch's own position, for certain, and no further.
        lsn = min(one.position.lsn for one in checked)
        if any(name not in found.tables for name in required):
            lsn = min(lsn, row_of(found.epoch).position.lsn)
        judged = judge(as_of(look, found.epoch, lsn), [one.sample for one in checked if one.sample is not None])
        why = "too old for the target"
        if judged.outcome is Outcome.SATISFIED and not (why := _late(required, records, row_of(found.epoch))):
            return replace(judged, epoch=found.epoch)
        below = below or f"the newest one that passed is of epoch {found.epoch} at {format_lsn(lsn)}, {why}"
    if fresh.outcome is None:
        return fresh
    said = [text for text in (_newest(must, known, records), below) if text]
    return replace(
        fresh,
        outcome=None,
        reason=f"fresh, but not yet validated: {'; '.join(said)}",
        eta_seconds=None,
        awaits_validation=True,
    )


def _late(required: Sequence[str], records: Mapping[str, TableRecord], row: Epoch) -> str:
    """Which table was not in step in the epoch of `row`, as it is loaded now; empty: all were."""
    for name in required:
        if not row.shows(name):
            return f"where {name} was {row.tables[name].state if name in row.tables else 'missing'}"
        if records[name].began_above(row.position.lsn):
            return f"and {name} was loaded again since"
    return ""


def as_of(look: Look, epoch: int, lsn: int) -> Look:
    """The lake as if it held no more than `epoch`, which is exact at `lsn`."""
    assert look.file is not None
    position = look.file.position.at(lsn)
    return replace(look, file=replace(look.file, epoch=epoch, position=position, read_position=lsn, pending={}))


def _newest(must: Sequence[str], known: Sequence[ValidatedEpoch], records: Mapping[str, TableRecord]) -> str:
    """What stands against the newest validation; empty when only its position does."""
    if not known:
        return "there is no validation yet"
    newest = known[0]
    lsn = min(one.position.lsn for one in newest.tables.values())
    why = newest.why_not(must, records)
    return f"the newest validation is of epoch {newest.epoch} at {format_lsn(lsn)}, and {why}" if why else ""
