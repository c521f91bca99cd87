"""Which relations of the source the entries of a pipeline file speak of. Pure: over the list of all relations."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from headwater.names import TableName, TablePattern
from headwater.pipeline_file.pipeline import TableEntry
from headwater.source.catalog.relations import KINDS, ORDINARY, PARTITIONED, Listed
from headwater.source.problems import Problem, error, warning


def match_entries(
    entries: Iterable[TableEntry], relations: Iterable[Listed]
) -> tuple[list[tuple[Listed, TableEntry]], list[Problem]]:
    """Which relation is replicated by which entry. A name goes before a pattern, an earlier pattern before a later."""
    by_name = {relation.name: relation for relation in relations}
    by_id = {relation.relation_id: relation for relation in by_name.values()}
    chosen: dict[int, tuple[Listed, TableEntry]] = {}
    problems: list[Problem] = []
    for entry in entries:
        if isinstance(entry.name, TablePattern):
            continue
        relation = by_name.get(entry.name)
        if relation is None:
            remedy = "correct the name in the pipeline file (names are SQL: quote upper case), or create the table"
            problems.append(error("table_missing", str(entry.name), "there is no such table in the source", remedy))
        elif relation.kind not in (ORDINARY, PARTITIONED):
            message = f"it is a {KINDS[relation.kind]}: its rows are not in the log"
            problems.append(error("not_a_table", str(entry.name), message, "take it out of the pipeline file"))
        else:
            chosen[relation.relation_id] = relation, entry
    named = set(chosen)
    for entry in entries:
        if not isinstance(entry.name, TablePattern):
            continue
        matching = [relation for relation in by_name.values() if _matches(entry, relation)]
        if not matching:
            problems.append(warning("pattern_empty", str(entry.name), "no table matches this pattern yet"))
        for name in entry.exclude:
            if isinstance(name, TableName) and name not in by_name:  # a typing error lets the table in
                message = f"it excludes {name}, and there is no such table in the source"
                remedy = "correct the name in exclude (names are SQL: quote upper case), or take it out"
                problems.append(warning("exclude_missing", str(entry.name), message, remedy))
        for relation in matching:
            chosen.setdefault(relation.relation_id, (relation, entry))
    result = []
    for relation_id, (relation, entry) in chosen.items():
        ancestor = _listed_ancestor(relation, by_id, chosen)
        if ancestor is None:
            result.append((relation, entry))
        elif relation_id in named:
            message = f"it is a partition of {ancestor.name}, which is listed: its rows are replicated there"
            problems.append(
                warning("partition_listed", str(relation.name), message, "take it out of the pipeline file")
            )
    return result, problems


def _matches(entry: TableEntry, relation: Listed) -> bool:
    if relation.kind not in (ORDINARY, PARTITIONED) or relation.persistence == "t":
        return False
    return entry.covers(relation.name)


def _listed_ancestor(relation: Listed, by_id: dict[int, Listed], chosen: dict[int, Any]) -> Listed | None:
    parent = by_id.get(relation.parent) if relation.parent is not None else None
    while parent is not None:
        if parent.relation_id in chosen:
            return parent
        parent = by_id.get(parent.parent) if parent.parent is not None else None
    return None
