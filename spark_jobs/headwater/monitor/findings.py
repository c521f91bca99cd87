"""What is wrong with a pipeline, how that is known, and what to do: as pure functions over what was examined.

The most urgent first: what stops the pipeline, what may cost the source its disk or the lake its slot, what is
behind, what is worth knowing. A finding is not repeated by what follows from it: without a slot no table goes on, and
that nobody replicates then is no finding of its own.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Final, Literal

from headwater.errors import EXIT_DONE, EXIT_FAILED, EXIT_REFUSED, EXIT_SUSPENDED
from headwater.gate.lease import LOAD
from headwater.gate.same_source import NEW_SOURCE, REPLICATE_SAYS, log_ends_before
from headwater.gate.wal_ceiling import BY_ITSELF, REMEDY
from headwater.monitor.examination import Examined, SourceAnswers
from headwater.pipeline_file.quantities import size_text
from headwater.position import format_lsn
from headwater.source.slot import SlotState, loss_of
from headwater.source.snapshots import OpenTransaction

_HELD_BYTES: Final = 16 << 20  # of log before what was confirmed: less is a matter of the server's own pace
_OLD_SECONDS: Final = 60.0
_NEAR: Final = 0.5  # of a bound on retained log
_LOW_BYTES: Final = 1 << 30
_LONG_LOG: Final = 1000  # commits; a checkpoint is written every hundred
_MANY_FILES: Final = 16  # of a table, due to be made into fewer: a few are what any driver leaves when it stops
_FOLLOWED: Final = ("active", "catching up")
_TO_BE_STARTED: Final = frozenset({"not_running", "loading"})


@dataclass(frozen=True, slots=True)
class Finding:
    """`evidence`: how it is known. `remedy`: a command where one cures it. An "error" stops the pipeline or a table."""

    code: str
    severity: Literal["error", "warning"]
    where: str
    message: str
    evidence: str
    remedy: str

    def to_json(self) -> dict[str, str]:
        return asdict(self)


def findings(seen: Examined) -> list[Finding]:
    """All of them, errors before warnings, and each of these in the order of this function."""
    stopped = [*_source(seen), *_slot(seen)]
    found = [
        *stopped,
        *_paused(seen),
        *(() if stopped and seen.failure is None else _driver(seen)),
        *_suspended(seen),
        *_retrying(seen),
        *_retained(seen),
        *_held(seen),
        *_checked(seen),
        *_unloaded(seen),
        *_late(seen),
        *_disk(seen),
        *_long_logs(seen),
        *_small_files(seen),
    ]
    exact = [replace(finding, remedy=seen.pipeline.with_file(finding.remedy)) for finding in found]
    return sorted(exact, key=lambda finding: finding.severity != "error")  # stable


def exit_status(seen: Examined, found: list[Finding]) -> int:
    """4 where a table is suspended, as of `status`; else 1 for what may pass or only has to be started, 2 for what a
    person must put right, 0 without an error."""
    errors = {finding.code for finding in found if finding.severity == "error"}
    if any(table["state"] == "suspended" for table in seen.tables.values()):
        return EXIT_SUSPENDED
    if seen.failure is not None:
        return seen.failure.exit_status
    if not errors:
        return EXIT_DONE
    return EXIT_FAILED if errors <= _TO_BE_STARTED else EXIT_REFUSED


def _source(seen: Examined) -> Iterator[Finding]:
    if seen.failure is not None:
        yield Finding(
            code=seen.failure.code,
            severity="error",
            where=seen.failure.where,
            message=f"no session at the source: {seen.failure.message}",
            evidence="a session was asked for; what follows is what the lake alone knows",
            remedy=seen.failure.remedy,
        )
    elif seen.answers is not None and (state := seen.answers.state).is_older:
        assert state.lake is not None
        yield Finding(
            code="source_changed",
            severity="error",
            where="source.connection",
            message=log_ends_before(state.position.lsn, state.lake.lsn),
            evidence="the source was asked behind a look at the lake",
            remedy=NEW_SOURCE,
        )
    elif not _same_log(seen):
        assert seen.answers is not None
        assert seen.known is not None
        now = seen.answers.state.position
        yield Finding(
            code="source_changed",
            severity="error",
            where="source.connection",
            message="this is another server, or another timeline, than the lake was built from",
            evidence=f"the lake: system {seen.known.system_id} timeline {seen.known.timeline}; "
            f"the source: system {now.system_id} timeline {now.timeline}",
            remedy=REPLICATE_SAYS,
        )


def _same_log(seen: Examined) -> bool:
    if seen.answers is None or seen.known is None:
        return True
    now = seen.answers.state.position
    return (seen.known.system_id, seen.known.timeline) == (now.system_id, now.timeline)


def _slot(seen: Examined) -> Iterator[Finding]:
    """Only where something was loaded: before, there need be none."""
    if seen.answers is None or seen.known is None or not _same_log(seen):
        return
    if any(problem.code == "foreign_slot" for problem in seen.answers.problems):
        return
    slot, where = seen.answers.state.slot, f"replication slot {seen.pipeline.source.slot}"
    start = format_lsn(seen.start)
    remedy = BY_ITSELF if seen.pipeline.source.on_slot_loss == "repair" else REMEDY
    if loss := loss_of(slot):
        yield Finding(
            code="slot_gap",
            severity="error",
            where=where,
            message=f"{loss}: the log no longer has the changes since {start}",
            evidence="pg_replication_slots has no such row" if slot is None else f"its wal_status is {slot.wal_status}",
            remedy=remedy,
        )
    elif slot is not None and slot.confirmed_lsn is not None and slot.has_passed(seen.start):
        yield Finding(
            code="slot_gap",
            severity="error",
            where=where,
            message="another program has read from the slot, or moved it: it no longer has the changes in between",
            evidence=f"the slot is confirmed up to {format_lsn(slot.confirmed_lsn)}, past the ledger's {start}",
            remedy=remedy,
        )


def _paused(seen: Examined) -> Iterator[Finding]:
    if seen.look.paused:
        yield Finding(
            code="paused",
            severity="warning",
            where=f"pipeline {seen.pipeline.name}",
            message="the pipeline is paused: nobody replicates, and the source keeps its log",
            evidence=f"the registry: paused since {seen.look.paused}",
            remedy="headwater resume PIPELINE.yaml",
        )


def _driver(seen: Examined) -> Iterator[Finding]:
    if seen.running or seen.look.paused or not any(t["state"] in _FOLLOWED for t in seen.tables.values()):
        return
    file = seen.look.file
    written = f"position.json was written last at {file.written_at}" if file is not None and file.written_at else ""
    if seen.answers is not None:
        evidence = f"nobody reads the slot{f'; {written}' if written else ''}"
    else:
        evidence = f"{written or 'there is no position.json'}, and not again while it was watched"
    yield Finding(
        code="not_running",
        severity="error",
        where=f"pipeline {seen.pipeline.name}",
        message="replication is stopped: no driver runs",
        evidence=evidence,
        remedy=f"headwater replicate PIPELINE.yaml (under Airflow: see the DAG {seen.pipeline.name}.replicate)",
    )


def _suspended(seen: Examined) -> Iterator[Finding]:
    """One for all tables that share a reason; the loss of the slot has been said."""
    loss = loss_of(seen.answers.state.slot) if seen.answers is not None else ""
    by_cause: dict[tuple[str, str], list[str]] = {}
    for name, table in seen.tables.items():
        if table["state"] == "suspended" and table["reason"] != loss:
            by_cause.setdefault((table["reason"], table["remedy"]), []).append(name)
    for (reason, remedy), names in by_cause.items():
        since = seen.tables[names[0]]["since"]
        yield Finding(
            code="suspended",
            severity="error",
            where=", ".join(names),
            message=f"suspended: {reason}",
            evidence=f"the registry, since {since}" if since else "the source's catalog, just now",
            remedy=remedy,
        )


def _retrying(seen: Examined) -> Iterator[Finding]:
    for name, table in seen.tables.items():
        if (trying := table["retrying"]) is not None and seen.running:
            yield Finding(
                code="retrying",
                severity="warning",
                where=name,
                message=f"it fails, and is suspended after {seen.pipeline.replicate.retry_seconds:g} "
                f"s of that: {trying['reason']}",
                evidence=f"position.json: tried again since {trying['since']}, {trying['attempts']} attempts failed",
                remedy="put right what the reason names: the next attempt goes on from where the table stands",
            )


def _retained(seen: Examined) -> Iterator[Finding]:
    slot = seen.answers.state.slot if seen.answers is not None else None
    if seen.answers is None or slot is None or slot.retained_wal_bytes is None or slot.loss:
        return
    bounds = {"source.wal_ceiling": seen.pipeline.source.wal_ceiling, "max_slot_wal_keep_size": seen.answers.bound}
    known = {name: bound for name, bound in bounds.items() if bound is not None}
    setting = min(known, key=lambda name: known[name], default=None)
    if setting is None or slot.retained_wal_bytes <= known[setting] * _NEAR:
        return
    past = slot.retained_wal_bytes > known[setting]
    yield Finding(
        code="wal_ceiling",
        severity="error" if past else "warning",
        where=f"replication slot {slot.name}",
        message=f"the source keeps {size_text(slot.retained_wal_bytes)} of its log for the slot; past "
        f"{size_text(known[setting])} ({setting}) it is given up, and every table has to be compared "
        "(headwater verify --repair)",
        evidence=f"pg_replication_slots: restart_lsn {_lsn(slot.restart_lsn)}, wal_status {slot.wal_status}",
        remedy=_less_log(seen, seen.answers, slot),
    )


def _less_log(seen: Examined, answers: SourceAnswers, slot: SlotState) -> str:
    """What lets go of the log, by what holds it."""
    if oldest := _holder(answers, slot):
        return _end_of(oldest)
    if seen.look.paused:
        return "headwater resume PIPELINE.yaml"
    if not seen.running:
        return "headwater replicate PIPELINE.yaml"
    return "let it catch up, see with headwater status PIPELINE.yaml which stage is the slow one, or raise the bound"


def _held(seen: Examined) -> Iterator[Finding]:
    slot = seen.answers.state.slot if seen.answers is not None else None
    if seen.answers is None or slot is None or (oldest := _holder(seen.answers, slot)) is None:
        return
    yield Finding(
        code="open_transaction",
        severity="warning",
        where=f"replication slot {slot.name}",
        message=f"a transaction that does not end holds the source's log back: {oldest}",
        evidence=f"the slot restarts at {_lsn(slot.restart_lsn)}, {size_text(_before(slot))} before what is confirmed "
        f"({_lsn(slot.confirmed_lsn)}): the beginning of a transaction that was open there",
        remedy=_end_of(oldest),
    )


def _before(slot: SlotState) -> int:
    """The bytes of log that are kept although everything behind them is confirmed."""
    return slot.confirmed_lsn - slot.restart_lsn if slot.confirmed_lsn and slot.restart_lsn else 0


def _holder(answers: SourceAnswers, slot: SlotState) -> OpenTransaction | None:
    """The oldest transaction that is open, where one holds the log."""
    if _before(slot) < _HELD_BYTES:
        return None
    return min(filter(_is_old, answers.state.open_transactions), key=lambda one: one.xid, default=None)


def _is_old(one: OpenTransaction) -> bool:
    """Prepared ones are meant to be short, and ages of others are not shown to every role."""
    return one.prepared_as is not None or one.age is None or one.age >= _OLD_SECONDS


def _end_of(open_transaction: OpenTransaction) -> str:
    if open_transaction.prepared_as is not None:
        name = open_transaction.prepared_as.replace("'", "''")
        return f"in the database {open_transaction.database}: ROLLBACK PREPARED '{name}', or COMMIT PREPARED '{name}'"
    return f"end it where it was begun, or at the source: SELECT pg_terminate_backend({open_transaction.pid})"


def _checked(seen: Examined) -> Iterator[Finding]:
    """What `check` says of settings, rights, publications and tables; of a table that is suspended it is said there."""
    suspended = {name for name, table in seen.tables.items() if table["state"] == "suspended"}
    for problem in seen.answers.problems if seen.answers is not None else ():
        if problem.code in ("slot_lost", "slot_gap", "source_changed") or problem.where in suspended:  # said already
            continue
        yield Finding(
            code=problem.code,
            severity=problem.severity,
            where=problem.where,
            message=problem.message,
            evidence="headwater check",
            remedy=problem.remedy,
        )


def _unloaded(seen: Examined) -> Iterator[Finding]:
    new = [name for name, table in seen.tables.items() if table["state"] == "new"]
    if new:
        yield Finding(
            code="not_replicated",
            severity="warning",
            where=", ".join(new),
            message="in the pipeline file, and never loaded",
            evidence="the lake has no table of that name that a load has made",
            remedy="headwater load PIPELINE.yaml",
        )
    loading = [name for name, table in seen.tables.items() if table["state"] == "loading"]
    if loading and seen.answers is not None and LOAD not in seen.answers.alive:
        yield Finding(
            code="loading",
            severity="error",
            where=", ".join(loading),
            message="its load was begun and has not ended, and none is running",
            evidence="the registry says loading, and no session at the source holds the lease of a load",
            remedy="headwater load PIPELINE.yaml",
        )


def _late(seen: Examined) -> Iterator[Finding]:
    late = [name for name, table in seen.tables.items() if table["late"] and table["state"] in _FOLLOWED]
    if late and seen.running:
        worst = max(late, key=lambda name: seen.tables[name]["lag_seconds"])
        table = seen.tables[worst]
        yield Finding(
            code="late",
            severity="warning",
            where=", ".join(late),
            message=f"{worst} is {table['lag_seconds']:.0f} s behind, its freshness {table['freshness_seconds']:g} s",
            evidence="samples of the source's clock beside its log",
            remedy="see with headwater status PIPELINE.yaml which stage is the slow one",
        )


def _disk(seen: Examined) -> Iterator[Finding]:
    for what, (folder, free) in seen.free.items():
        if free < _LOW_BYTES:
            yield Finding(
                code="disk_low",
                severity="warning",
                where=folder,
                message=f"only {size_text(free)} are free for the {what}",
                evidence="statvfs, on this machine",
                remedy="make room there; headwater maintain PIPELINE.yaml removes what no cut needs"
                if what == "lake"
                else "make room there, or point TMPDIR of replicate to another disk",
            )


def _long_logs(seen: Examined) -> Iterator[Finding]:
    long = {name: count for name, count in seen.unchecked.items() if count > _LONG_LOG}
    if long:
        yield Finding(
            code="long_log",
            severity="warning",
            where=", ".join(long),
            message=f"up to {max(long.values())} commits since the newest checkpoint: opening it becomes slow",
            evidence="the names in its _delta_log",
            remedy="headwater maintain PIPELINE.yaml",
        )


def _small_files(seen: Examined) -> Iterator[Finding]:
    many = {name: count for name, count in seen.small.items() if count >= _MANY_FILES}
    if many:
        yield Finding(
            code="small_files",
            severity="warning",
            where=", ".join(many),
            message=f"up to {max(many.values())} small files that no driver makes into fewer: each costs every query",
            evidence="the files of its newest version, by the sizes that a driver goes by",
            remedy="headwater maintain PIPELINE.yaml, or let a driver run",
        )


def _lsn(lsn: int | None) -> str:
    return format_lsn(lsn) if lsn is not None else "unknown"
