"""What another program may change about a table without a row: its columns, properties and features. What Headwater
writes must still fit exactly; else the table is suspended before anything is written.

Accepted is what no writer has to heed (comments, retention, properties of somebody's own), and what Delta's own writer
heeds: such a table is written by Spark from then on (`headwater.apply.direct.obstacle`). All else is not. What a
user may do and what comes of it: docs/reference/foreign-writes.md, row by row a test.

Source: Delta transaction protocol, "Change Metadata", "Protocol Evolution", "Domain Metadata", "Table Properties".
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from headwater.delta.clustering import DOMAIN
from headwater.delta.delta_log import Snapshot, read_snapshot
from headwater.delta.delta_types import fields_of
from headwater.delta.layout import layout_of
from headwater.delta.log_entries import Action, read_actions
from headwater.delta.tables import Commit, current, is_ours, own_history
from headwater.delta.whole import is_whole

_OF_NO_WRITER: Final = frozenset(
    {
        "delta.autoOptimize",
        "delta.autoOptimize.autoCompact",
        "delta.autoOptimize.optimizeWrite",
        "delta.checkpoint.writeStatsAsJson",
        "delta.checkpoint.writeStatsAsStruct",
        "delta.checkpointInterval",
        "delta.columnMapping.maxColumnId",
        "delta.dataSkippingNumIndexedCols",
        "delta.dataSkippingStatsColumns",
        "delta.deletedFileRetentionDuration",
        "delta.enableExpiredLogCleanup",
        "delta.isolationLevel",
        "delta.logRetentionDuration",
        "delta.parquet.compression.codec",
        "delta.randomPrefixLength",
        "delta.randomizeFilePrefixes",
        "delta.sampleRetentionDuration",
        "delta.targetFileSize",
        "delta.tuneFileSizesForRewrites",
    }
)
"""Properties that say how files are laid out, or how long they are kept."""
_OF_DELTAS_WRITER: Final = frozenset(
    {
        "delta.checkpointPolicy",
        "delta.enableChangeDataFeed",
        "delta.enableDeletionVectors",
        "delta.enableInCommitTimestamps",
        "delta.enableRowTracking",
        "delta.enableTypeWidening",
        "delta.inCommitTimestampEnablementTimestamp",
        "delta.inCommitTimestampEnablementVersion",
        "delta.requireCheckpointProtectionBeforeVersion",
        "delta.rowTracking.materializedRowCommitVersionColumnName",
        "delta.rowTracking.materializedRowIdColumnName",
        "delta.rowTrackingSuspended",
    }
)
_CONSTRAINT: Final = "delta.constraints."
_APPEND_ONLY: Final = "delta.appendOnly"
_MODE: Final = "delta.columnMapping.mode"
_FEATURES: Final = frozenset(
    {
        "allowColumnDefaults",
        "appendOnly",
        "changeDataFeed",
        "checkConstraints",
        "checkpointProtection",
        "clustering",
        "columnMapping",
        "deletionVectors",
        "domainMetadata",
        "inCommitTimestamp",
        "invariants",
        "rowTracking",
        "timestampNtz",
        "typeWidening",
        "v2Checkpoint",
        "vacuumProtocolCheck",
        "variantType",
    }
)
"""Table features that this writer or Delta's own keeps the rules of."""
_DOMAINS: Final = frozenset({DOMAIN, "delta.rowTracking"})
_OF_A_COLUMN: Final = frozenset(
    {"comment", "CURRENT_DEFAULT", "delta.columnMapping.id", "delta.columnMapping.physicalName"}
)
"""What a schema says beside a column that changes none of the values that are written into it."""


def foreign_terms(path: str, commits: Sequence[Commit], app_id: str, *, appended_to: bool) -> str:
    """Why the table must not be written on after these commits, of which some may be others' and none has foreign rows;
    empty if it may. `appended_to`: nothing else is ever done to it."""
    others = [commit for commit in commits if not is_ours(commit, app_id)]
    for commit in others:
        why = _unfit(path, commit, appended_to) if commit.terms else ""
        if why:
            return f"{commit.described} was written by another program and {why}"
    if any(commit.operation.startswith("VACUUM") for commit in others) and not is_whole(path, commits[-1].version):
        return "a VACUUM of another program has removed files that it needs"
    return ""


def why_unwritable(path: str, app_id: str, *, appended_to: bool) -> str:
    """Why what Headwater writes would not fit the table as it stands, whatever its rows are; empty if it fits."""
    stands = current(path, app_id)
    if stands is None:
        return "its Delta table is gone from the lake"
    return foreign_terms(path, own_history(path, stands[0], app_id, None), app_id, appended_to=appended_to)


def _unfit(path: str, commit: Commit, appended_to: bool) -> str:
    try:
        before = read_snapshot(path, commit.version - 1)
    except FileNotFoundError:
        return "changes it, and what it was before cannot be read any more"
    after = Snapshot(path, before.version, {}, {}, before.protocol, before.metadata, dict(before.domains))
    after.follow(read_actions(path, commit.version) or [])
    return why_unfit(before, after, appended_to=appended_to)


def why_unfit(before: Snapshot, after: Snapshot, *, appended_to: bool) -> str:
    """What has changed between two states of a table that what Headwater writes does not fit; empty if it fits."""
    return next(_changes(before, after, appended_to), "")


def _changes(before: Snapshot, after: Snapshot, appended_to: bool) -> Iterator[str]:
    if before.metadata.get("id") != after.metadata.get("id"):
        yield "makes it another table"
    if _stored(before.metadata) != _stored(after.metadata):
        yield "changes its partitioning"
    yield from _columns(before, after)
    yield from _properties(before.configuration, after.configuration, appended_to)
    unknown = after.features - before.features - _FEATURES
    if unknown:
        yield f"gives it the features {', '.join(sorted(unknown))}, whose rules Headwater does not know"
    for name in sorted(before.domains.keys() | after.domains.keys()):
        if name.startswith("delta.") and name not in _DOMAINS and before.domains.get(name) != after.domains.get(name):
            yield f"changes its {name}"


def _stored(metadata: Action) -> tuple[Any, ...]:
    return list(metadata.get("partitionColumns") or ()), (metadata.get("format") or {}).get("provider")


def _columns(before: Snapshot, after: Snapshot) -> Iterator[str]:
    old, new = _columns_of(before.metadata), _columns_of(after.metadata)
    gone, came = sorted(old.keys() - new.keys()), sorted(new.keys() - old.keys())
    other = sorted(name for name in old.keys() & new.keys() if old[name] != new[name])
    said = [
        f"{word} {', '.join(names)}" for word, names in (("without", gone), ("with", came), ("other:", other)) if names
    ]
    if said:
        yield f"changes its columns ({'; '.join(said)})"


def _columns_of(metadata: Action) -> dict[str, tuple[Any, ...]]:
    """Of each column what decides which values it can have, and where these lie in files."""
    layout = layout_of(metadata)
    return {
        field["name"]: (
            layout.in_files(field["name"]),
            json.dumps(field["type"], sort_keys=True),
            field.get("nullable", True),
            sorted((key, value) for key, value in (field.get("metadata") or {}).items() if key not in _OF_A_COLUMN),
        )
        for field in fields_of(metadata)
    }


def _properties(before: Mapping[str, str], after: Mapping[str, str], appended_to: bool) -> Iterator[str]:
    for name in sorted(before.keys() | after.keys()):
        was, now = before.get(name), after.get(name)
        if was == now or not name.startswith("delta.") or name in _OF_NO_WRITER | _OF_DELTAS_WRITER:
            continue
        if name.startswith(_CONSTRAINT) or (name == _APPEND_ONLY and (now != "true" or appended_to)):
            continue
        if name == _MODE and (was or "none", now) == ("none", "name"):
            continue  # columns keep their names in files, or that was said above
        if name == _APPEND_ONLY:
            yield f"sets {name}, which has to be unset before the table can be loaded"
        yield f"sets {name} to {now}" if now is not None else f"takes {name} away"
