"""How many rows a Delta table has at a version, from its log alone: no data file is opened.

Files say in their statistics how many rows were written, deletion vectors how many of these are gone. delta-rs'
own count leaves the vectors out, so the log is read here: the newest classic checkpoint and the commits after it
(Delta protocol, "Action Reconciliation").
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq


def row_count(path: str, version: int) -> int | None:
    """Rows of the table at `path` in `version`; None when its log or its files' statistics do not tell."""
    log = Path(path) / "_delta_log"
    try:
        start = max((_version(f) for f in log.glob("*.checkpoint.parquet") if _version(f) <= version), default=None)
        # By file and vector: a commit that changes a file's vector removes the one entry and adds the other.
        rows: dict[tuple[str, str], int] = {}
        if start is not None:
            for add in pq.read_table(log / f"{start:020d}.checkpoint.parquet", columns=["add"])["add"].to_pylist():
                if add is not None:
                    rows[_key(add)] = _rows(add)
        for number in range(0 if start is None else start + 1, version + 1):
            _apply(log / f"{number:020d}.json", rows)
    except (OSError, KeyError, TypeError, ValueError):
        return None
    return sum(rows.values())


def _apply(commit: Path, rows: dict[tuple[str, str], int]) -> None:
    actions = [json.loads(line) for line in commit.read_text(encoding="utf-8").splitlines() if line]
    for action in actions:
        if "remove" in action:
            rows.pop(_key(action["remove"]), None)
    for action in actions:
        if "add" in action:
            rows[_key(action["add"])] = _rows(action["add"])


def _key(file: dict[str, Any]) -> tuple[str, str]:
    vector = file.get("deletionVector") or {}
    return file["path"], f"{vector.get('pathOrInlineDv', '')}@{vector.get('offset') or 0}"


def _rows(add: dict[str, Any]) -> int:
    vector = add.get("deletionVector") or {}
    return int(json.loads(add["stats"])["numRecords"]) - int(vector.get("cardinality") or 0)


def _version(checkpoint: Path) -> int:
    return int(checkpoint.name.split(".", 1)[0])
