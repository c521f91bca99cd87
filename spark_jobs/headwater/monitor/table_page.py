"""What a table's page tells besides its state: the files of its newest version, its schemas, and its reloads.

From the registry's record and the table's own log: no data file is opened.
"""

from __future__ import annotations

from statistics import median
from typing import Any

from headwater.delta import commit_notes
from headwater.delta.delta_log import read_commit_info, read_snapshot
from headwater.delta.row_count import row_count
from headwater.lake.paths import table_path
from headwater.lake.registry import Registry, TableRecord
from headwater.position import format_lsn
from headwater.schema import Column

_OF_OTHERS = {"OPTIMIZE": "small files were made into larger ones; rows are what they were"}
"""What commits of Delta's own are for."""


def files_of(root: str, record: TableRecord, version: int | None) -> dict[str, Any] | None:
    """Data files of the table at `version` (None: the newest), in bytes and rows; None when its log does not tell."""
    folder = table_path(root, record.path)
    try:
        snapshot = read_snapshot(folder, version)
    except (OSError, KeyError, TypeError, ValueError):
        return None
    sizes = [file.size for file in snapshot.files.values()]
    soft = bool(record.schemas) and record.schema.soft_delete
    return {
        "version": snapshot.version,
        "count": len(sizes),
        "bytes": sum(sizes),
        "smallest": min(sizes, default=0),
        "median": int(median(sizes)) if sizes else 0,
        "largest": max(sizes, default=0),
        "rows": row_count(folder, snapshot.version, soft_delete=soft),
        "deleted_rows": sum(file.deleted for file in snapshot.files.values()),
        "with_deletion_vector": sum(file.vector is not None for file in snapshot.files.values()),
    }


def reason_of(folder: str, version: int) -> str | None:
    """Why the commit `version` took its apply path; None where it does not say, or is not there any more."""
    try:
        info = read_commit_info(folder, version)
    except (OSError, ValueError):
        return None
    return commit_notes.reason(info) or _OF_OTHERS.get(info.get("operation", ""))


def reloads_of(registry: Registry, table: str | None = None) -> list[dict[str, Any]]:
    """The reloads that the registry still knows (of `table`; None: of all), newest first, each with what has become of
    it: "asked", "read" and "keeping" go on, "done", "failed" and "given up" are past."""
    shown = []
    for reload in registry.reloads.values():
        if table is not None and reload.table != table:
            continue
        kept = registry.kept.get(reload.name)
        if kept is None and reload.state == "read":
            continue  # an older Headwater thinned out what became of it
        answered = kept is not None and (kept.state != "keeping" or reload.state == "asked")
        state = kept.state if kept is not None and answered else reload.state
        shown.append(
            {
                "table": reload.table,
                "part": reload.shown,
                "state": state,
                "running": state in ("asked", "read", "keeping"),
                "since": kept.since if kept is not None and answered else reload.since,
                "rows": reload.rows if reload.state == "read" else None,
                "replaced": kept.replaced if kept is not None and kept.state == "done" else None,
                "version": kept.version if kept is not None else None,
                "reason": kept.reason if kept is not None else "",
            }
        )
    return sorted(shown, key=lambda one: str(one["since"]), reverse=True)


def schema_versions(record: TableRecord) -> list[dict[str, Any]]:
    """Each schema of the table, newest first: from which position it holds, its columns, and what had changed."""
    versions: list[dict[str, Any]] = []
    before: dict[int, Column] | None = None
    for lsn, schema in record.schemas:
        columns = {column.attnum: column for column in schema.columns}
        versions.append(
            {
                "from_lsn": format_lsn(lsn),
                "columns": [
                    {
                        "name": column.name,
                        "type": _type(column),
                        "key": column.name in schema.key,
                        "not_null": column.not_null,
                    }
                    for column in schema.columns
                ],
                "changes": _changes(before, columns) if before is not None else [],
            }
        )
        before = columns
    return versions[::-1]


def _type(column: Column) -> str:
    value = column.value
    if value.precision is not None and "(" not in value.lake:
        return f"{value.lake}({value.precision},{value.scale or 0})"
    return value.lake


def _changes(before: dict[int, Column], after: dict[int, Column]) -> list[str]:
    """In words; columns are the same by attnum, as the source numbers them."""
    said = [f"added {column.name} {_type(column)}" for number, column in after.items() if number not in before]
    said += [f"dropped {column.name}" for number, column in before.items() if number not in after]
    for number, column in after.items():
        if (old := before.get(number)) is None:
            continue
        if old.name != column.name:
            said.append(f"renamed {old.name} to {column.name}")
        if old.value != column.value:
            said.append(f"{column.name}: {_type(old)} is now {_type(column)}")
    return said
