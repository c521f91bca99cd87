"""What the reader hides of registered tables, and whether the key is the one that they were loaded with."""

from __future__ import annotations

from collections.abc import Iterable

from headwater.errors import Refused
from headwater.hidden import fingerprint
from headwater.lake.registry import TableRecord
from headwater.log.hiding import Hiding
from headwater.names import TableName
from headwater.pipeline_file.pipeline import Pipeline
from headwater.schema import Column, TableSchema


def hiding(pipeline: Pipeline, records: Iterable[TableRecord]) -> Hiding:
    """For the log. Refused without the key of a replicated table; of one that was removed nothing is shown at all."""
    key = b""
    known = [record for record in records if record.schemas]
    relations: dict[int, tuple[Column, ...]] = {
        record.schema.relation_id: () for record in known if record.state == "removed" and record.schema.hides
    }
    # By the pipeline file, where no pattern hides anything, or as they were loaded.
    names = {entry.name for entry in pipeline.tables if isinstance(entry.name, TableName) and entry.columns.hides}
    names |= {TableName.parse(record.name) for record in known if record.schema.hides}
    shown: set[int] = set()
    # Of a table that was renamed and loaded under its new name: the relation is the same, and is not removed.
    for record in (record for record in known if record.state != "removed"):
        relations.pop(record.schema.relation_id, None)
        shown |= {leaf.relation_id for leaf in record.schema.leaves if TableName(leaf.schema, leaf.name) in names}
        if record.schema.hides:
            key = key_of(pipeline, record.schema) or key
            relations[record.schema.relation_id] = record.schema.columns
    return Hiding(key, relations, frozenset(names), frozenset(shown))


def refuse_two_keys(pipeline: Pipeline, records: Iterable[TableRecord], schemas: Iterable[TableSchema]) -> None:
    """Before a load of `schemas` changes anything: nothing can be replicated where one table was hashed with another
    key than the next. `records`: all tables; those of the pipeline file that are not loaded stay as they are."""
    wanted = {str(TableName(schema.schema, schema.name)): schema for schema in schemas}
    new = {fingerprint for schema in wanted.values() for fingerprint in schema.hashed.values()}
    stay = [r for r in records if r.name not in wanted and pipeline.entry_for(TableName.parse(r.name)) is not None]
    hashed = [r for r in stay if r.schemas and r.state != "removed" and r.schema.hashed]
    other = sorted(r.name for r in hashed if new and set(r.schema.hashed.values()) != new)
    if other:
        raise Refused(
            f"source.hash_key holds another key than when {', '.join(other)} was loaded: equal values would differ",
            code="hash_key",
            where="load",
            remedy="give it the former key; or, for the new one, stop replicate, then headwater load PIPELINE.yaml "
            f"--again with --table for each table with columns.hash at once, {', '.join(other)} among them",
        )


def key_of(pipeline: Pipeline, schema: TableSchema) -> bytes:
    """The key that the table was loaded with; empty if it hashes nothing. Refused when the environment has another."""
    if not schema.hashed:
        return b""
    key = pipeline.hash_key()
    if set(schema.hashed.values()) != {fingerprint(key)}:
        name = str(TableName(schema.schema, schema.name))
        raise Refused(
            f"{pipeline.source.hash_key} holds another key than when the table was loaded: equal values would differ",
            code="hash_key",
            where=name,
            remedy="give it the former key; or, for the new one, stop replicate, then headwater load PIPELINE.yaml "
            f"--again --table {name} and with --table for each other table with columns.hash",
        )
    return key
