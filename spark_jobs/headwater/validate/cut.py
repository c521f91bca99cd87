"""Which cut `headwater validate` looks at: the newest one, or one that a wait has handed on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headwater.errors import Refused
from headwater.lake.cuts import Cut, refuse_behind
from headwater.lake.ledger import Epoch, read_epoch
from headwater.lake.registry import TableRecord
from headwater.names import TableName
from headwater.pipeline_file.pipeline import Pipeline
from headwater.reading.newest_views import newest_cut

LeftOut = dict[str, dict[str, Any]]


def cut_to_validate(
    pipeline: Pipeline,
    tables: Sequence[TableName],
    given: Mapping[str, Any] | None,
    records: Mapping[str, TableRecord],
) -> tuple[Cut, LeftOut]:
    """The cut of the tables in step (of `tables`; none: of all), and the others, each with its state and the reason.

    Refused when `given` is no cut of this lake, when there is no epoch, and when no table is left.
    """
    cut = newest_cut(pipeline) if given is None else _checked(pipeline, given, records)
    wanted = [str(name) for name in tables] or list(cut["tables"])
    in_step, left_out = {}, {}
    for name in wanted:
        entry = cut["tables"].get(name)
        record = records.get(name)
        if entry is not None and entry["state"] == "in step" and record is not None:
            in_step[name] = entry
        else:
            left_out[name] = _left_out(entry, record)
    if not in_step:
        reasons = "; ".join(f"{name}: {found['reason']}" for name, found in left_out.items())
        raise Refused(
            f"there is no table in step to validate ({reasons or 'the lake has none'})",
            code="nothing_to_validate",
            where=f"pipeline {pipeline.name}, epoch {cut['epoch']}",
            remedy="headwater status PIPELINE.yaml names each table's state and remedy",
        )
    kept = {name: value for name, value in cut.items() if name in ("pipeline", "epoch", "position", "source_time")}
    return {**kept, "tables": in_step}, left_out


def _checked(pipeline: Pipeline, given: Mapping[str, Any], records: Mapping[str, TableRecord]) -> Cut:
    """`given`, if the ledger says that its versions are what it says they are: what is recorded as validated is handed
    on to others by its epoch. Tables that were loaded again since are behind."""
    try:
        owner, number, versions = given["pipeline"], given["epoch"], given["tables"].items()
        refuse_behind(given, allow_behind=True)
        read = {name: (table["version"], table["state"], table["path"]) for name, table in versions}
        parts = [name for name, table in versions if "partitions" in table]
        assert given["position"]["lsn"]
    except (KeyError, TypeError, AttributeError):
        raise _no_cut(pipeline, "it is not what `headwater wait` or a sensor gives") from None
    if parts:
        # What is recorded of a version is taken for all of its rows.
        raise _no_cut(pipeline, f"it shows some partitions of {', '.join(parts)} only; wait without `partitions`")
    if owner != pipeline.name:
        raise _no_cut(pipeline, f"it is of the pipeline {owner}")
    epoch = read_epoch(pipeline.lake_path(), number) if isinstance(number, int) else None
    if epoch is None:
        raise _no_cut(pipeline, f"the ledger has no epoch {number}")
    for name, (version, state, _) in read.items():
        held = epoch.tables.get(name)
        if state == "in step" and (held is None or held.version != version):
            raise _no_cut(pipeline, f"epoch {number} does not hold version {version} of {name}")
    return {**given, "tables": {name: _as_loaded_now(table, records.get(name), epoch) for name, table in versions}}


def _as_loaded_now(entry: Mapping[str, Any], record: TableRecord | None, epoch: Epoch) -> Mapping[str, Any]:
    """What is recorded of a table is taken for its present load's, of which an older one may not have the columns."""
    if entry["state"] != "in step" or record is None or not record.began_above(epoch.position.lsn):
        return entry
    return {**entry, "state": "behind", "reason": f"it was loaded again since epoch {epoch.epoch}"}


def _no_cut(pipeline: Pipeline, reason: str) -> Refused:
    return Refused(
        f"that is no cut of this lake: {reason}",
        code="bad_cut",
        where=f"--cut, pipeline {pipeline.name}",
        remedy="give the file into which `headwater wait --json` wrote its cut, or leave --cut out for the newest one",
    )


def _left_out(entry: Mapping[str, Any] | None, record: TableRecord | None) -> dict[str, Any]:
    if record is None:
        state, reason = "new", "it is not loaded"
    elif entry is None:
        state, reason = record.state, "the cut does not hold it"
    else:
        state, reason = record.state, entry.get("reason", "")
    nothing: dict[str, Any] = {"rows": None, "suites": {}, "failed": [], "keys": []}
    return {"success": None, **nothing, "state": state, "reason": reason}
