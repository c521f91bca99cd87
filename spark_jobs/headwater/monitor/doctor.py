"""`headwater doctor`: a sick pipeline explained. Three points side by side (the source's log and the slot, the ledger,
what each table has), findings with their evidence and their cure, and what is in order. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from headwater.monitor.examination import Examined, examine
from headwater.monitor.findings import Finding, exit_status, findings
from headwater.pipeline_file.pipeline import Pipeline
from headwater.pipeline_file.quantities import size_text
from headwater.position import format_lsn


def doctor(pipeline: Pipeline) -> tuple[dict[str, Any], int]:
    """The JSON of "doctor", and the exit status."""
    seen = examine(pipeline)
    found = findings(seen)
    report = {
        "pipeline": pipeline.name,
        "running": seen.running,
        "paused": seen.look.paused or None,
        "lag_bytes": seen.lag[0],
        "lag_seconds": seen.lag[1],
        "positions": _positions(seen),
        "findings": [finding.to_json() for finding in found],
        "in_order": list(_in_order(seen, {finding.code for finding in found}, found)),
        "open_transactions": [str(one) for one in seen.answers.state.open_transactions] if seen.answers else None,
        "leases": _leases(seen),
        "free": {what: {"folder": folder, "bytes": free} for what, (folder, free) in seen.free.items()},
        "tables": {name: {key: table[key] for key in _OF_A_TABLE} for name, table in seen.tables.items()},
    }
    return report, exit_status(seen, found)


_OF_A_TABLE = ("state", "reason", "since", "remedy", "lag_seconds")


def _positions(seen: Examined) -> dict[str, Any]:
    state, file = seen.answers.state if seen.answers is not None else None, seen.look.file
    slot, newest = state.slot if state is not None else None, seen.newest
    return {
        "source": state.position.to_json() if state is not None else None,
        "slot": {
            "name": seen.pipeline.source.slot,
            "restart_lsn": _lsn(slot.restart_lsn),
            "confirmed_lsn": _lsn(slot.confirmed_lsn),
            "active": slot.active,
            "wal_status": slot.wal_status,
            "retained_wal_bytes": slot.retained_wal_bytes,
        }
        if slot is not None
        else None,
        "ledger": {**newest.position.to_json(), "epoch": newest.epoch, "generation": newest.generation}
        if newest is not None
        else None,
        "read_lsn": _lsn(file.read_position) if file is not None else None,
        "applied": {name: format_lsn(lsn) for name, lsn in sorted(seen.applied.items())},
    }


def _lsn(lsn: int | None) -> str | None:
    return format_lsn(lsn) if lsn is not None else None


def _leases(seen: Examined) -> list[dict[str, Any]]:
    """Those that are written down. `alive` None: only the source could tell."""
    alive = seen.answers.alive if seen.answers is not None else None
    return [
        {
            "name": lease.name,
            "host": lease.host,
            "pid": lease.pid,
            "since": lease.taken_at,
            "alive": lease.name in alive if alive is not None else None,
        }
        for lease in seen.leases
    ]


def _in_order(seen: Examined, codes: set[str], found: list[Finding]) -> Iterator[str]:
    """What was looked at and is well, in sentences."""
    if seen.answers is not None:
        state, slot = seen.answers.state, seen.answers.state.slot
        yield f"the source answers; its log ends at {format_lsn(state.position.lsn)}"
        if slot is not None and not codes & {"slot_gap", "foreign_slot", "source_changed"}:
            kept = f", which keeps {size_text(slot.retained_wal_bytes)}" if slot.retained_wal_bytes is not None else ""
            yield f"the slot can deliver all that follows the ledger{kept} of the source's log"
        if not any(finding.evidence == "headwater check" for finding in found):
            yield "settings, rights and publications are as they should be"
        if "open_transaction" not in codes:
            yield "no open transaction holds the log back"
    if seen.running:
        yield "a replicate driver is alive"
    in_step = sum(table["state"] == "active" for table in seen.tables.values())
    if in_step:
        yield f"{in_step} of {len(seen.tables)} tables are active"
    for what, (folder, free) in seen.free.items():
        if not any(finding.code == "disk_low" and finding.where == folder for finding in found):
            yield f"{size_text(free)} are free for the {what} ({folder})"
