"""How many changed rows the source had counted of each table when it was last known to be equal: a file of the lake.

It is written as a whole, by `reload --changed` alone. Whoever loses it loses candidates of the next one, nothing else.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from headwater.delta import storage
from headwater.lake.paths import source_counts_path


@dataclass(frozen=True, slots=True)
class Counted:
    """Of one table in this `incarnation`, while the lake had applied its commits up to `applied_lsn`. `rows`: inserted,
    updated and deleted ones, by relation id of the leaf. `at`: ISO 8601 UTC."""

    incarnation: int
    applied_lsn: int
    rows: Mapping[int, int]
    at: str


def read_counts(root: str) -> dict[str, Counted]:
    try:
        found = json.loads(storage.read_text(source_counts_path(root)))
    except (FileNotFoundError, ValueError):  # a power cut may leave it empty, or zeros for content
        return {}
    return {
        name: Counted(
            known["incarnation"],
            known["applied_lsn"],
            {int(relation): rows for relation, rows in known["rows"].items()},
            known["at"],
        )
        for name, known in found.items()
    }


def write_counts(root: str, counts: Mapping[str, Counted]) -> None:
    content = {name: asdict(counted) for name, counted in sorted(counts.items())}
    storage.replace(source_counts_path(root), json.dumps(content).encode())
