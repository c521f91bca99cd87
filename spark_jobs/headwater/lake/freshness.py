"""Is the lake fresh enough for a task? The verdict, as pure functions over values: no I/O, no clock of its own.

A requirement (now, a position, a moment, a greatest staleness, the pipeline file's own) is turned once into a
target; each look at the lake is then judged against it. The rule: a table covers every commit up to the read
position of the pipeline or, when a change of it has been read and no published epoch holds it yet, everything below
that change. The target is met when every wanted table is in step and covers it. Nothing else may satisfy a wait:
above all no epoch number and no clock but the source's. The outcomes are one enum for the command line, Python, the
sensor and the trigger.

Times are aware datetimes of the source's clock, positions are LSNs of one log (`Look.log`). Standard library only.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from enum import StrEnum

from headwater.errors import EXIT_DONE, EXIT_NOT_FRESH, EXIT_REFUSED, EXIT_SUSPENDED
from headwater.lake.look import IN_STEP, Look, ReportedState, complete_until
from headwater.lake.requirements import Target
from headwater.position import format_lsn

LOG_RATE = "apply_bytes_per_second"
"""The entry of the position file's `rates` from which the time still to wait is estimated: how far the published
position moves through the log in a second while there is something to apply."""
SOURCE_RATE = "log_bytes_per_second"
"""How fast the source writes its log."""

_EACH = "headwater status PIPELINE.yaml names each table's remedy"
_LONGER = "wait longer, or see with headwater status PIPELINE.yaml which stage is the slow one"
_DRIFT = timedelta(seconds=1)
_BEYOND = 1 << 64
"""Above every LSN."""


class Outcome(StrEnum):
    """How a wait can end."""

    SATISFIED = "satisfied"
    TIMED_OUT = "timed_out"
    SUSPENDED = "suspended"
    LOADING = "loading"
    NOT_REPLICATED = "not_replicated"
    PAUSED = "paused"
    NOT_RUNNING = "not_running"
    TIMELINE_CHANGED = "timeline_changed"
    SOURCE_UNREACHABLE = "source_unreachable"
    FUTURE_POSITION = "future_position"
    NOT_VALIDATED = "not_validated"

    @property
    def exit_status(self) -> int:
        return _EXIT_STATUS[self]


_EXIT_STATUS = {
    Outcome.SATISFIED: EXIT_DONE,
    Outcome.TIMED_OUT: EXIT_NOT_FRESH,
    Outcome.SUSPENDED: EXIT_SUSPENDED,
    Outcome.LOADING: EXIT_SUSPENDED,
    Outcome.NOT_REPLICATED: EXIT_REFUSED,
    Outcome.PAUSED: EXIT_NOT_FRESH,
    Outcome.NOT_RUNNING: EXIT_NOT_FRESH,
    Outcome.TIMELINE_CHANGED: EXIT_REFUSED,
    Outcome.SOURCE_UNREACHABLE: EXIT_NOT_FRESH,
    Outcome.FUTURE_POSITION: EXIT_REFUSED,
    Outcome.NOT_VALIDATED: EXIT_NOT_FRESH,
}


@dataclass(frozen=True, slots=True)
class TableGap:
    """How far one wanted table is from the target; `gap_bytes` is None where there is no position to compare."""

    state: str
    reason: str
    gap_bytes: int | None


@dataclass(frozen=True, slots=True)
class Verdict:
    """`outcome` None: waiting may still cure it. `lsn`: the highest position for which the wanted tables are exact.

    `epoch`: the one that satisfies, where it is not the newest. `awaits_validation`: nothing else is missing.
    """

    outcome: Outcome | None
    reason: str = ""
    remedy: str = ""
    tables: Mapping[str, TableGap] = field(default_factory=dict)
    lsn: int = 0
    eta_seconds: float | None = None
    ignored: tuple[str, ...] = ()
    epoch: int | None = None
    awaits_validation: bool = False


def verdict(
    target: Target,
    look: Look,
    wanted: Sequence[str],
    *,
    source_now: datetime | None = None,
    samples: Sequence[tuple[datetime, int]] = (),
    ignore_suspended: bool = False,
) -> Verdict:
    """Judge one look. `source_now` and `samples` (clock, LSN; beyond those of the file) matter for staleness only."""
    ignored = tuple(name for name in wanted if ignore_suspended and _state(look, name).state == "suspended")
    required = [name for name in wanted if name not in ignored]
    tables = {name: _gap(target, look, name) for name in required}
    judged = _terminal(target, look, required, ignored) or _judge(target, look, required, source_now, samples)
    if judged.outcome is None and look.paused:
        reason = f"the pipeline is paused since {look.paused}; {judged.reason}"
        judged = replace(judged, outcome=Outcome.PAUSED, reason=reason, remedy="headwater resume PIPELINE.yaml")
    return replace(judged, tables=tables, ignored=ignored, eta_seconds=_eta(judged, look, tables))


def at_deadline(waiting: Verdict, *, alive: bool, stopped: str, pipeline_file: str) -> Verdict:
    """What a wait that is still waiting at its deadline ends as. `alive`: a driver was seen to live during the wait;
    `stopped`: that none was, in words."""
    if waiting.awaits_validation:
        return replace(
            waiting, outcome=Outcome.NOT_VALIDATED, remedy=f"headwater validate {pipeline_file}, then wait again"
        )
    if alive:
        return replace(waiting, outcome=Outcome.TIMED_OUT, remedy=_LONGER)
    return replace(
        waiting,
        outcome=Outcome.NOT_RUNNING,
        reason=f"{stopped}; {waiting.reason}",
        remedy=f"headwater replicate {pipeline_file}",
        eta_seconds=None,
    )


def hopeless(waiting: Verdict, seconds_left: float) -> Verdict:
    """Timed out already, if the estimate says that the wait will not be over in time; else as it was."""
    if waiting.eta_seconds is None or waiting.eta_seconds <= seconds_left:
        return waiting
    return replace(
        waiting,
        outcome=Outcome.TIMED_OUT,
        reason=f"it would take about {waiting.eta_seconds:.1f} s, and {seconds_left:.1f} s are left; {waiting.reason}",
        remedy=_LONGER,
    )


def refuse_target(target: Target, source: tuple[str, int], insert_lsn: int) -> Verdict | None:
    """Why the source says that `target` can never be met; None when it can. `insert_lsn`: where its log ends."""
    if target.log is not None and target.log != source:
        return _timeline_changed(target.log, source)
    if target.lsn is not None and target.lsn > insert_lsn:
        return Verdict(
            Outcome.FUTURE_POSITION,
            f"the position {format_lsn(target.lsn)} lies beyond the end of the source's log, "
            f"{format_lsn(insert_lsn)}: nothing has been written there yet",
            "give a position taken at this source, for example by headwater.commit_position",
        )
    return None


def _state(look: Look, name: str) -> ReportedState:
    return look.tables.get(name, ReportedState("new", "it has not been loaded"))


def _terminal(target: Target, look: Look, required: Sequence[str], ignored: Sequence[str]) -> Verdict | None:
    """What waiting cannot cure, the most fundamental first."""
    if target.log is not None and look.log is not None and target.log != look.log:
        return _timeline_changed(target.log, look.log)
    if not required:
        what = "every wanted table is suspended" if ignored else "the pipeline has no loaded table"
        outcome = Outcome.SUSPENDED if ignored else Outcome.NOT_REPLICATED
        return Verdict(outcome, what, _EACH if ignored else "headwater load PIPELINE.yaml")
    for states, outcome, remedy in _TERMINAL_STATES:
        for name in required:
            table = _state(look, name)
            if table.state in states:
                reason = f"{name} is {table.state}" + (f": {table.reason}" if table.reason else "")
                return Verdict(outcome, reason, table.remedy or remedy)
    return None


_TERMINAL_STATES: tuple[tuple[frozenset[str], Outcome, str], ...] = (
    (frozenset({"new", "removed"}), Outcome.NOT_REPLICATED, "headwater load PIPELINE.yaml"),
    (frozenset({"suspended"}), Outcome.SUSPENDED, f"{_EACH}; --ignore-suspended leaves it out"),
    (frozenset({"loading"}), Outcome.LOADING, "wait until headwater load has ended"),
)


def _judge(
    target: Target,
    look: Look,
    required: Sequence[str],
    source_now: datetime | None,
    samples: Sequence[tuple[datetime, int]],
) -> Verdict:
    lagging = [name for name in required if _state(look, name).state != IN_STEP]
    if lagging:
        name = lagging[0]
        table = _state(look, name)
        return Verdict(None, f"{name} is {table.state}" + (f": {table.reason}" if table.reason else ""))
    if look.file is None or look.file.epoch == 0:
        return Verdict(None, "no epoch has been published yet")
    lsn = min(map(look.covered, required))
    reason = _short_of_position(target, look, required) or _too_stale(target, look, required, source_now, samples)
    return Verdict(Outcome.SATISFIED if not reason else None, reason, lsn=lsn)


def _short_of_position(target: Target, look: Look, required: Sequence[str]) -> str:
    """Why the tables that go by the position do not cover it; empty when they do."""
    named = [name for name in required if target.staleness(name) is None]
    if not named:
        return ""
    if target.now:
        return "the source has not said yet where its log ends"
    if target.lsn is None:
        return f"the source's clock is not known to have reached {target}: no sample at or after it has been seen"
    behind = min(named, key=look.covered)
    return "" if look.covered(behind) >= target.lsn else f"{_whereabouts(look, behind)}; wanted: {target}"


def _too_stale(
    target: Target,
    look: Look,
    required: Sequence[str],
    source_now: datetime | None,
    samples: Sequence[tuple[datetime, int]],
) -> str:
    """Why the newest moment of which the lake holds everything is not recent enough for a table; empty when it is."""
    assert look.file is not None
    named = {name: limit for name in required if (limit := target.staleness(name)) is not None}
    if not named:
        return ""
    if source_now is None:
        return "the source's clock is not known: it has not answered yet"
    for name in sorted(named, key=look.covered):
        lsn = look.covered(name)
        # What is said to have been later than now was said before the clock was set back. Two clocks drift a little.
        complete = complete_until(look.file, lsn, [*samples, (source_now + _DRIFT, _BEYOND)])
        if complete is None:
            return f"no sample of the source's clock lies at or below {format_lsn(lsn)}, up to which {name} is complete"
        staleness = (source_now - complete).total_seconds()
        if staleness > named[name]:
            return f"{name} is known complete up to {staleness:.1f} s ago; wanted: {named[name]:g} s"
    return ""


def _whereabouts(look: Look, name: str) -> str:
    assert look.file is not None
    if name in look.file.pending:
        return f"a change of {name} at {format_lsn(look.file.pending[name])} has been read and is not published yet"
    return f"the log has been read up to {format_lsn(look.file.read_position)}"


def _gap(target: Target, look: Look, name: str) -> TableGap:
    table = _state(look, name)
    by_position = target.lsn is not None and target.staleness(name) is None
    known = by_position and look.file is not None and target.log in (None, look.log)
    gap = max(0, (target.lsn or 0) - look.covered(name)) if known else None
    return TableGap(table.state, table.reason, gap)


def _eta(judged: Verdict, look: Look, tables: Mapping[str, TableGap]) -> float | None:
    rate = look.file.rates.get(LOG_RATE, 0.0) if look.file is not None else 0.0
    gaps = [gap.gap_bytes for gap in tables.values() if gap.gap_bytes is not None]
    return round(max(gaps) / rate, 3) if judged.outcome is None and rate > 0 and gaps else None


def _timeline_changed(wanted: tuple[str, int], found: tuple[str, int]) -> Verdict:
    if wanted[0] != found[0]:
        reason = f"the position belongs to the server {wanted[0]}, the log here to {found[0]}"
    else:
        reason = f"the position belongs to timeline {wanted[1]}, the log here to timeline {found[1]}"
    return Verdict(
        Outcome.TIMELINE_CHANGED,
        f"{reason}: positions of two logs cannot be compared",
        "take a position from this source and wait again; if the lake has yet to follow it: headwater replicate "
        "PIPELINE.yaml goes on, or says what to do",
    )
