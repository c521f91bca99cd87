"""How a pipeline is, in one sentence and one word: the first thing that every screen says, and the same on each.

Pure: from one look at the lake, what the source answered last and the lags of the tables. Times that are shown are UTC;
lags go by the source's clock (`headwater.monitor.lags`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence, Sized
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any, Final, Literal

from headwater.lake.look import IN_STEP, Look, complete_until
from headwater.pipeline_file.quantities import seconds_text, size_text

Level = Literal["ok", "late", "degraded", "stopped", "paused"]
LEVELS: Final[tuple[Level, ...]] = ("ok", "late", "degraded", "stopped", "paused")

LATE_SECONDS: Final = 60.0
"""A table whose `freshness` the pipeline file does not say is late beyond this."""
_NEAR: Final = 0.5  # of the bound on the log that the source keeps
_AGE: Final = 90.0  # seconds; a moment that is longer ago is given with how long ago


@dataclass(frozen=True, slots=True)
class Health:
    """`remedy`: the one command that helps; empty where nothing has to be done, or nothing here can do it. `table`: the
    one that sentence and remedy are about; None: the pipeline is."""

    level: Level
    sentence: str
    remedy: str = ""
    table: str | None = None

    def to_json(self) -> dict[str, str | None]:
        return asdict(self)


@dataclass(frozen=True, slots=True)
class SlotRoom:
    """The bytes of log that the source keeps for the slot, and those past which the slot is given up."""

    retained: int | None = None
    bound: int | None = None


@dataclass(frozen=True, slots=True)
class Facts:
    """What health follows from.

    `tables`: as `status` shows them, by name: `state`, `reason`, `remedy`, `retrying`, `lag_seconds`,
    `freshness_seconds`. `file`: the pipeline file, as a shell needs it. `running`: whether a driver lives, None if that
    is not known yet. `load_lives`: the same of a load, None if the source does not answer. `outage`: that the source
    does not answer, and why; empty: it does. `now` is this machine's clock, and only tells how long ago something was.
    `named`: the tables that the pipeline file names itself, and not only by a pattern.
    """

    look: Look
    tables: Mapping[str, Mapping[str, Any]]
    file: str
    running: bool | None
    now: datetime
    outage: str = ""
    load_lives: bool | None = None
    room: SlotRoom = SlotRoom()
    eta_seconds: float | None = None
    named: Collection[str] = ()

    @property
    def followed(self) -> dict[str, Mapping[str, Any]]:
        """The tables that were loaded, or are being loaded."""
        return {name: table for name, table in self.tables.items() if table["state"] not in ("removed", "new")}

    @property
    def suspended(self) -> list[str]:
        return [name for name, table in self.tables.items() if table["state"] == "suspended"]

    @property
    def loading(self) -> list[str]:
        return [name for name, table in self.tables.items() if table["state"] == "loading"]

    @property
    def is_published(self) -> bool:
        """Whether an epoch was, ever."""
        return self.look.file is not None and self.look.file.epoch > 0


def health(facts: Facts) -> Health:
    """The first that holds: paused, nothing loaded, stopped, degraded, late, ok."""
    followed = facts.followed
    if facts.look.paused:
        since = moment_text(facts.look.paused, facts.now)
        sentence = f"Paused since {since}: no driver replicates until it is resumed{_besides(facts.suspended)}"
        return Health("paused", _ended(sentence), f"headwater resume {facts.file}")
    if not facts.is_published and (loading := _first_load(facts)) is not None:
        return loading
    if not followed:  # all of them left the pipeline file
        return Health("stopped", "Stopped: no table is loaded.", f"headwater load {facts.file}")
    if facts.running is False:
        return _stopped(facts)
    return (
        _degraded(facts)
        or _late(facts)
        or Health("ok", f"Up to date: {_all(followed)}, {_at_most(followed)} behind the source.")
    )


def stopped_since(look: Look, now: datetime) -> str:
    """That no driver lives, and since when."""
    if look.file is None:
        return "no driver has replicated yet"
    # A file that is made up from the ledger does not say when it was written.
    return f"no driver since {moment_text(look.file.written_at, now)}" if look.file.written_at else "no driver runs"


def moment_text(moment: str, now: datetime) -> str:
    """An ISO 8601 moment for a person: `12:03 UTC`, with its day if that is another one, and how long ago it was."""
    then = datetime.fromisoformat(moment).astimezone(UTC)
    text = f"{then:%H:%M} UTC" if then.date() == now.astimezone(UTC).date() else f"{then:%Y-%m-%d %H:%M} UTC"
    age = (now - then).total_seconds()
    return f"{text} ({seconds_text(age)} ago)" if age >= _AGE else text


def _first_load(facts: Facts) -> Health | None:
    """What comes before the first epoch, as long as that is a load."""
    load = f"headwater load {facts.file}"
    if facts.load_lives and (facts.loading or not facts.followed):
        return Health("late", f"Loading: {_loaded(facts.tables)}.")
    if facts.loading and facts.load_lives is False:
        return Health("stopped", f"Stopped: a load ended before it was done; {_loaded(facts.tables)}.", load)
    return None if facts.followed else Health("stopped", "Stopped: no table is loaded yet.", load)


def _stopped(facts: Facts) -> Health:
    since, silent = stopped_since(facts.look, facts.now), "; the source does not answer" if facts.outage else ""
    sentence, suspended = f"Stopped: {since}{_as_of(facts.look)}{silent}", facts.suspended
    if len(suspended) < len(facts.followed):
        # Without its source a driver would end again; doctor says what keeps the source from answering.
        command = "doctor" if facts.outage else "replicate"
        return Health("stopped", _ended(f"{sentence}{_besides(suspended)}"), f"headwater {command} {facts.file}")
    # A driver would find nothing to do: what suspends all of them comes first.
    first = facts.followed[suspended[0]]
    remedy = first["remedy"] or f"headwater doctor {facts.file}"
    every = "every table is suspended" if len(suspended) > 1 else f"{suspended[0]} is suspended"
    name = suspended[0] if len(suspended) == 1 else None
    return Health("stopped", _ended(f"{sentence}; {every}{_because(first)}"), remedy, name)


def _degraded(facts: Facts) -> Health | None:
    remedy = f"headwater doctor {facts.file}"
    followed, room = facts.followed, facts.room
    name = None
    if facts.suspended:
        name = facts.suspended[0]
        remedy = followed[name]["remedy"] or remedy
        which = f"{name} is suspended"
        if len(facts.suspended) > 1:
            which = f"{len(facts.suspended)} of {_all(followed)} are suspended, among them {name}"
        silent = "; the source does not answer" if facts.outage else ""
        sentence = f"{which}{_because(followed[name])}{silent}"
    elif facts.loading and facts.load_lives is False:
        sentence = f"the load of {facts.loading[0]} ended before it was done"
        remedy = f"headwater load {facts.file}"
    elif facts.outage:
        alive = "whether a driver lives is not known yet" if facts.running is None else "the driver tries again"
        sentence = f"{facts.outage}; {alive}{_as_of(facts.look)}"
    elif failing := [name for name, table in followed.items() if table["retrying"] is not None]:
        trying = followed[failing[0]]["retrying"]
        since = moment_text(trying["since"], facts.now)
        name = failing[0]
        sentence = f"{name} has failed since {since} and is tried again: {trying['reason']}"
    elif room.retained is not None and room.bound is not None and room.retained > room.bound * _NEAR:
        kept, bound = size_text(room.retained), size_text(room.bound)
        sentence = f"the source keeps {kept} of its log; past {bound} the slot is given up"
    else:
        return None
    return Health("degraded", _ended(f"Degraded: {sentence}"), remedy, name)


def _late(facts: Facts) -> Health | None:
    followed = facts.followed
    late = {
        name: table
        for name, table in followed.items()
        if table["state"] == IN_STEP and (table["lag_seconds"] or 0.0) > allowed_seconds(table)
    }
    eta = f", about {seconds_text(facts.eta_seconds)} to go" if facts.eta_seconds is not None else ""
    if late:
        worst = max(late, key=lambda name: late[name]["lag_seconds"] / max(allowed_seconds(late[name]), 1e-9))
        table, others = late[worst], f"; {len(late)} of {_all(followed)} are late" if len(late) > 1 else ""
        behind, allowed = seconds_text(table["lag_seconds"]), seconds_text(allowed_seconds(table))
        sentence = f"{worst} is {behind} behind the source, {allowed} are allowed{eta}{others}"
        return Health("late", f"Late: {sentence}.", f"headwater status {facts.file} --verbose", worst)
    unknown = [name for name, table in followed.items() if table["state"] == IN_STEP and table["lag_seconds"] is None]
    unready = [name for name, table in followed.items() if table["state"] != IN_STEP]
    if unready:
        which = unready[0] if len(unready) == 1 else f"{len(unready)} of {_all(followed)}"
        doing = "loading" if all(followed[name]["state"] == "loading" for name in unready) else "catching up"
        return Health("late", f"Late: {which} {_is(unready)} {doing}{eta}.")
    # A wait for all tables waits for these, too. What only a pattern matches may have come to the source by itself.
    missing = [name for name, table in facts.tables.items() if table["state"] == "new" and name in facts.named]
    if missing:
        which = f"{missing[0]} is" if len(missing) == 1 else f"{len(missing)} tables are"
        sentence = f"Late: {which} in the pipeline file and not loaded."
        return Health("late", sentence, f"headwater load {facts.file}", missing[0] if len(missing) == 1 else None)
    if unknown:
        which = unknown[0] if len(unknown) == 1 else f"{len(unknown)} of {_all(followed)}"
        return Health("late", f"Late: how far {which} {_is(unknown)} behind is not known yet.")
    return None


def allowed_seconds(table: Mapping[str, Any]) -> float:
    """How far a table may be behind before it is late."""
    wanted: float | None = table["freshness_seconds"]
    return wanted if wanted is not None else LATE_SECONDS


def _because(table: Mapping[str, Any]) -> str:
    return f": {table['reason']}" if table["reason"] else ""


def _ended(sentence: str) -> str:
    return f"{sentence.rstrip('.')}."


def _as_of(look: Look) -> str:
    """Up to which moment of the source the lake holds everything; empty where that is not known."""
    if look.file is None or not look.file.epoch:
        return ""
    covered = [look.covered(name) for name, table in look.tables.items() if table.state == IN_STEP]
    complete = complete_until(look.file, min(covered, default=look.file.position.lsn))
    return f"; the lake holds everything up to {complete.astimezone(UTC):%Y-%m-%d %H:%M:%S} UTC" if complete else ""


def _besides(suspended: Sequence[str]) -> str:
    if not suspended:
        return ""
    return f"; {suspended[0]} is suspended" if len(suspended) == 1 else f"; {len(suspended)} tables are suspended"


def _all(tables: Mapping[str, Any]) -> str:
    return "1 table" if len(tables) == 1 else f"{len(tables)} tables"


def _is(things: Sized) -> str:
    return "is" if len(things) == 1 else "are"


def _loaded(tables: Mapping[str, Mapping[str, Any]]) -> str:
    wanted = [table for table in tables.values() if table["state"] != "removed"]
    done = sum(table["state"] not in ("loading", "new") for table in wanted)
    return f"{done} of {'1 table is' if len(wanted) == 1 else f'{len(wanted)} tables are'} loaded"


def _at_most(followed: Mapping[str, Mapping[str, Any]]) -> str:
    most = max(table["lag_seconds"] or 0.0 for table in followed.values())
    return "less than 1 s" if most < 1 else f"at most {seconds_text(most)}"
