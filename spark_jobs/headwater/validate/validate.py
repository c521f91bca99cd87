"""`headwater validate`: do the rows of a consistent cut meet what is expected of them?

The suites are judged first, then a cut is taken (or given) and pinned, each of its tables is read at its version and
run through the suite of its file and the basics, and how it came out is written into the lake with the cut's epoch and
position. A cut whose tables have all passed stays pinned, so that whoever waits for a validated cut can be given it.

Nothing of the replicated tables is changed, and no lease is taken: cuts do not move.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from typing import Any

from headwater.errors import Refused
from headwater.gate.recovery import mended_registry
from headwater.lake.cuts import Cut, Pin, list_pins, pin_cut, read, release_pin, time_text
from headwater.lake.ledger import last_sample
from headwater.lake.validations import TableResult, Validation, record
from headwater.names import TableName
from headwater.pipeline_file.pipeline import Pipeline
from headwater.position import Position
from headwater.spark.session import job_session
from headwater.validate.cut import cut_to_validate
from headwater.validate.enum_labels import enum_labels
from headwater.validate.expectations import SHOWN_KEYS, ExpectationOutcome, check_suites, require_great_expectations
from headwater.validate.one_table import TableValidation
from headwater.validate.pages import write_pages
from headwater.validate.suites import read_suites

log = logging.getLogger(__name__)

KEEP = 24 * 3600.0
"""Seconds for which a validated cut is kept, unless `lake.keep_cuts` is longer or another one takes its place."""
_OWNER = "validated"


def validate(
    pipeline: Pipeline,
    tables: Sequence[TableName] = (),
    *,
    cut: Mapping[str, Any] | None = None,
    incremental: bool = False,
    pages: str | None = None,
    keep: float | None = None,
    progress: Callable[[str], None] = log.info,
) -> dict[str, Any]:
    """Validate `tables` (none: all) at `cut` (None: the newest one). The JSON of the reference's "validate".

    `incremental`: of each table, expectations that a row meets or not by itself are asked of the rows alone that came
    since its last validation. `pages`: the folder for the HTML pages, in the lake where None. `keep`: for how many
    seconds a cut that has passed is kept. Refused, before anything is read, where suites or cut cannot be used.
    """
    started, clock = datetime.now(UTC), time.monotonic()
    root = pipeline.lake_path()
    registry = mended_registry(pipeline)
    if registry is None or registry.pipeline is None:
        raise Refused(
            "nothing was ever loaded into this lake",
            code="nothing_loaded",
            where=f"pipeline {pipeline.name}",
            remedy="headwater load PIPELINE.yaml",
        )
    records = {name: found for name, found in registry.tables.items() if found.schemas and found.state != "removed"}
    suites = read_suites(pipeline, {name: found.schema for name, found in records.items()})
    check_suites(suites)
    chosen, left_out = cut_to_validate(pipeline, tables, cut, records)
    keep = max(KEEP, pipeline.lake.keep_cuts) if keep is None else keep
    kept_until = started + timedelta(seconds=keep)
    with _pinned(pipeline, chosen, kept_until) as pin:
        spark = job_session(pipeline.name, "validate", pipeline.lake_path())
        frames = read(spark, chosen)
        labels = enum_labels(pipeline, {name: records[name].schema for name in chosen["tables"]})
        outcomes: dict[str, list[ExpectationOutcome]] = {}
        results: list[TableResult] = []
        told: dict[str, dict[str, Any]] = {}
        for name, entry in chosen["tables"].items():
            work = TableValidation(root, records[name], entry, frames[name], suites.get(name), labels.get(name, {}))
            result, outcomes[name] = work.run(Position.from_json(chosen["position"]), incremental=incremental)
            results.append(result)
            told[name] = _told(result, outcomes[name], work)
            progress(f"{name}: {_said(told[name])}")
        position = Position.from_json(chosen["position"])
        validation = Validation(
            id=uuid.uuid4().hex,
            pipeline=pipeline.name,
            epoch=chosen["epoch"],
            position=position,
            sample=last_sample(root, position),
            tables=results,
            started_at=started,
            finished_at=datetime.now(UTC),
            kept_until=kept_until,
            gx_version=require_great_expectations(),
        )
        record(root, validation)
        written = write_pages(root, pages, validation, outcomes)
        success = all(result.success for result in results)
        kept = _keep_what_passed(pipeline, pin, [result.table for result in results if result.success])
    return {
        "validation": validation.id,
        "position": chosen["position"],
        "epoch": chosen["epoch"],
        "success": success,
        "tables": {**told, **left_out},
        "pages": written,
        "pin": {"id": kept.id, "expiry": time_text(kept.expiry)} if kept is not None else None,
        "great_expectations": validation.gx_version,
        "seconds": round(time.monotonic() - clock, 3),
    }


@contextlib.contextmanager
def _pinned(pipeline: Pipeline, cut: Cut, until: datetime) -> Iterator[Pin]:
    """`cut`, kept from clean-up inside the block: by a pin of its own, which another validation leaves alone."""
    root = pipeline.lake_path()
    pin = pin_cut(root, cut, f"validating {pipeline.name} {socket.gethostname()}:{os.getpid()}", until)
    try:
        yield pin
    finally:
        release_pin(root, pin.id)


def _keep_what_passed(pipeline: Pipeline, pin: Pin, passed: Sequence[str]) -> Pin | None:
    """Of the cut the tables that passed stay pinned, and what earlier validations pinned of them is given up: waits are
    given the newest one."""
    if not passed:
        return None
    root, cut = pipeline.lake_path(), pin.cut
    part = {**cut, "tables": {name: cut["tables"][name] for name in passed}}
    kept = pin_cut(root, part, f"{_OWNER} {pipeline.name}", pin.expiry)
    for other in list_pins(root):
        older = other.owner == kept.owner and other.id != kept.id and other.cut["epoch"] <= cut["epoch"]
        if older and set(other.cut["tables"]) <= set(passed):
            release_pin(root, other.id)
    return kept


def _told(result: TableResult, outcomes: Sequence[ExpectationOutcome], work: TableValidation) -> dict[str, Any]:
    failed = [outcome for outcome in outcomes if not outcome.success]
    keys = [
        {"key": key, "expectation": outcome.expectation.kind, "columns": list(outcome.expectation.columns)}
        for outcome in failed
        for key in outcome.keys
    ]
    return {
        "success": result.success,
        "rows": result.rows,
        "suites": {
            suite.suite: {"expectations": suite.expectations, "failed": suite.failed, "warnings": suite.warnings}
            for suite in result.suites
        },
        "failed": [outcome.to_json() for outcome in failed],
        "keys": keys[:SHOWN_KEYS],
        "mode": "full" if result.base_epoch is None else "incremental",
        "base_epoch": result.base_epoch,
        "note": work.note,
        "columns_left_out": work.columns_left_out,
        "version": result.version,
        "state": "in step",
        "reason": "",
    }


def _said(told: Mapping[str, Any]) -> str:
    failed = "; ".join(f"{one['expectation']} ({one['severity']})" for one in told["failed"])
    verdict = "passed" if told["success"] else "failed"
    left_out = ", ".join(told["columns_left_out"])
    asked = f", nothing asked of {left_out} (Great Expectations cannot name them)" if left_out else ""
    return f"{verdict}, {told['rows']} rows{asked}" + (f": {failed}" if failed else "")
