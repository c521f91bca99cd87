"""Why a table cannot be followed any more, by what the catalog shows of it now and what was known before.

Pure functions: the facts are read by `headwater.replicate.catalog_watch.facts`, what becomes of a judgement is
`headwater.replicate.catalog_watch.watch`'s.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Final

from headwater.errors import SchemaChanged
from headwater.lake.registry import TableRecord
from headwater.names import quote_ident
from headwater.replicate.catalog_watch.facts import CatalogFacts
from headwater.source.catalog.identity import carried_columns, choose_key, identity_remedy, why_writers_would_fail
from headwater.source.catalog.meanings import other_meanings
from headwater.source.catalog.relations import CatalogRelation
from headwater.source.catalog.standing import Standing, standing_problem
from headwater.source.publication.publication import publication_problems

_CHANGED: Final = "headwater reload PIPELINE.yaml --changed"
_LOSSY: Final = ("publication_operations", "publication_via_root")


def silence(
    record: TableRecord,
    standing: Standing,
    facts: CatalogFacts,
    rewritten: Collection[int],
    meanings: Mapping[str, str],
) -> SchemaChanged | None:
    """Why changes of the table do not come, or have not come, through the log. `rewritten`: relations whose values DDL
    has made anew, as the log has told; `meanings`: of the table's types, as they were known before."""
    gone = _gone(record, standing) or _unpublished(record, standing, facts)
    if gone is not None:
        return gone
    root = facts.relations[record.schema.relation_id]
    publication = facts.publications[standing.registered.publication]
    return (
        _other_columns(record, root, publishes_generated=publication is None or publication.publishes_generated)
        or _other_texts(record, meanings, facts.meanings_of(record))
        or _other_values(record, root, facts, rewritten)
    )


def _gone(record: TableRecord, standing: Standing) -> SchemaChanged | None:
    found = standing_problem(standing)
    return SchemaChanged(found.message, where=record.name, remedy=found.remedy) if found is not None else None


def _unpublished(record: TableRecord, standing: Standing, facts: CatalogFacts) -> SchemaChanged | None:
    publication = facts.publications[standing.registered.publication]
    if publication is None:
        return None
    for problem in publication_problems(publication):
        if problem.code in _LOSSY:
            message = f"the publication {quote_ident(publication.name)} was changed: {problem.message}"
            return SchemaChanged(message, where=record.name, remedy=f"{problem.remedy}; then {_again(record)}")
    return None


def _other_columns(record: TableRecord, root: CatalogRelation, *, publishes_generated: bool) -> SchemaChanged | None:
    """The log would show the same names and types as before, and older rows have lost their values."""
    name, again = record.name, _again(record)
    here = {attribute.attnum: attribute.name for attribute in root.attributes}
    # A load would leave these out as well.
    never = {a.attnum for a in root.attributes if a.generated == "v" or (a.generated and not publishes_generated)}
    known = {column.name for column in record.schema.columns}
    if record.schema.excluded:
        # A column list does not grow by itself: nothing of a new column is in the log.
        for attnum, new in here.items():
            if attnum > record.schema.last_attnum and attnum not in never:
                message = f"its column {quote_ident(new)} was added, which its column list does not publish"
                return SchemaChanged(message, where=name, remedy=f"{again} (or name it in columns.exclude first)")
    for column in record.schema.columns:
        now = here.get(column.attnum)
        if now is None and root.attribute(column.name) is not None:
            message = f"its column {quote_ident(column.name)} was dropped and added again"
            return SchemaChanged(message, where=name, remedy=again)
        # Leaves have their columns in an order of their own: there the log cannot tell.
        if record.schema.partitioned and now is not None and now != column.name and now in known:
            message = f"its column {quote_ident(column.name)} took the name of another one, {quote_ident(now)}"
            return SchemaChanged(message, where=name, remedy=again)
    return None


def _other_texts(record: TableRecord, before: Mapping[str, str], now: Mapping[str, str]) -> SchemaChanged | None:
    others = other_meanings(before, now)
    if not others:
        return None
    message = f"values in its rows look different now, by ALTER TYPE: {'; '.join(others)}"
    return SchemaChanged(
        message, where=record.name, remedy=f"headwater verify PIPELINE.yaml --table {record.name} --repair"
    )


def _other_values(
    record: TableRecord, root: CatalogRelation, facts: CatalogFacts, rewritten: Collection[int]
) -> SchemaChanged | None:
    again = _again(record)
    for holder in facts.holders(root):
        if holder.relation_id in rewritten and not _retyped(record, root):
            message = f"{holder.name} was rewritten by ALTER TABLE: the log does not carry the values it has now"
            remedy = _CHANGED if _is_comparable(record, root) else again
            return SchemaChanged(message, where=record.name, remedy=remedy)
        if holder.persistence == "u":
            message = f"{holder.name} was set UNLOGGED: its changes are not in the log"
            remedy = f"ALTER TABLE {holder.name} SET LOGGED; then {again}"
            return SchemaChanged(message, where=record.name, remedy=remedy)
    return None


def _is_comparable(record: TableRecord, root: CatalogRelation) -> bool:
    """Whether `reload --changed` puts it right: rows are compared under the columns that are registered, and a table
    that keeps deleted rows or every change is not repaired."""
    if record.schema.soft_delete or record.schema.history:
        return False
    here = {attribute.attnum: attribute.name for attribute in root.attributes}
    same = all(here.get(column.attnum) == column.name for column in record.schema.columns)
    return same and not any(a.attnum > record.schema.last_attnum and not a.generated for a in root.attributes)


def _retyped(record: TableRecord, root: CatalogRelation) -> bool:
    """Whether a column has another type than registered: the next Relation message shows it, and who follows it asks
    whether the table was written anew. For columns that were dropped or renamed nobody asks, and one that was added is
    not followed behind its own rewrite, but it is behind an earlier one."""
    types = {column.attnum: (column.type_oid, column.typmod) for column in record.schema.columns}
    return any(types.get(a.attnum, (a.type_oid, a.typmod)) != (a.type_oid, a.typmod) for a in root.attributes)


def _again(record: TableRecord) -> str:
    return f"headwater load PIPELINE.yaml --table {record.name} --again"


@dataclass(frozen=True, slots=True)
class Keyless:
    """A table whose rows cannot be found by their key any more; `cure` gives the key back. Without one, a load chooses
    another key."""

    message: str
    cure: str
    writers_fail: bool

    def unpublished(self) -> Keyless:
        said = "; it was taken out of the publication, so that the source's UPDATE and DELETE go on"
        return Keyless(self.message + said, self.cure, self.writers_fail)

    def still_published(self, statement: str) -> Keyless:
        said = f"; the source's own UPDATE and DELETE fail until this is run there: {statement}"
        return Keyless(self.message + said, f"a DBA runs: {statement}; then {self.cure}", self.writers_fail)

    def error(self, name: str) -> SchemaChanged:
        again = f"headwater load PIPELINE.yaml --table {name} --again"
        return SchemaChanged(self.message, where=name, remedy=f"{self.cure}; then {again}" if self.cure else again)


def key_problem(
    record: TableRecord, standing: Standing, facts: CatalogFacts, *, declares_key: bool = True
) -> Keyless | None:
    """Whether the key still finds the rows, and the source's writers go on; a table that is not published is left.
    `declares_key`: whether the pipeline file names the key, so that a load would choose no other."""
    schema = record.schema
    root = facts.relations.get(schema.relation_id)
    publication = facts.publications[standing.registered.publication]
    if schema.insert_only or root is None or standing.membership is None or publication is None:
        return None
    # By attnum: a renamed key column is still the key, and its new name comes with the next Relation message.
    present = {attribute.attnum: attribute.name for attribute in root.attributes}
    key = tuple(present[attnum] for attnum in (schema.column(name).attnum for name in schema.key) if attnum in present)
    holders = facts.holders(root)
    for holder in holders:
        narrowed = facts.narrowed.get(holder.relation_id)
        if narrowed is not None and (reason := narrowed.why_writers_would_fail(holder)) is not None:
            return Keyless(f"{holder.name}: {reason}", "give it back the replica identity that it had", True)
        if why_writers_would_fail(holder, facts.version, publication.publishes_generated) is not None:
            message = f"the key of {holder.name} was dropped at the source, or its replica identity does not name one"
            return Keyless(message, _cure(holder if holder.indexes else root, key), True)
    has_another = not declares_key and not choose_key(root, holders, None, insert_only=False)[1]
    if len(key) < len(schema.key):
        cure = "" if has_another else _cure(root, ())
        return Keyless(f"a column of its key ({', '.join(schema.key)}) was dropped", cure, False)
    _, problems = choose_key(root, holders, key, insert_only=False)
    if not problems:
        return None
    carried = all(set(key) <= carried_columns(holder) for holder in holders)
    what = "nothing guarantees its key any more" if carried else "its replica identity does not carry the key any more"
    # What is unique still gets its identity back; what is not unique may have equal values by now.
    cure = "" if has_another and problems[0].code != "key_not_carried" else problems[0].remedy
    return Keyless(f"{what}: {problems[0].message}", cure, False)


def _cure(relation: CatalogRelation, key: tuple[str, ...]) -> str:
    columns = ", ".join(map(quote_ident, key))
    return identity_remedy(relation, key).replace("(...)", f"({columns})" if columns else "(...)")
