"""What it means when the log shows other columns than the registry: which of them are which, and what the table in the
lake is to become. Pure: what the catalog says is handed in.

A Relation message carries names and types, no attnum, so the columns of the message are found in the source's catalog.
That is later than the message: where the catalog has moved on in a way that leaves two readings, where values changed
that the log does not carry (a rewrite), or where the lake would need another type, the answer is SchemaChanged: the
table is suspended, because a guess would put values under the wrong column.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Final

from headwater.errors import SchemaChanged
from headwater.lake.registry import TableRecord
from headwater.log.blocks import Relation, RelationColumn
from headwater.names import TableName, quote_ident
from headwater.schema import Column, Leaf, TableSchema, ValueType, is_widening
from headwater.source.catalog.column_facts import ColumnFacts

COLUMNS_CHANGED: Final = "its columns changed at the source, and no change of it has come through the log since"
FOLLOWS: Final = "the lake follows with the next change of the table that the log brings; or "


def between(before: TableSchema, columns: Collection[Column]) -> tuple[dict[str, str], list[Column], list[Column]]:
    """What of `columns` differs from those of `before`: new names by old ones, the columns that are added, and those
    whose type in the lake is another one."""
    old = {column.attnum: column for column in before.columns}
    same = [column for column in columns if column.attnum in old]
    renamed = {old[c.attnum].name: c.name for c in same if old[c.attnum].name != c.name}
    widened = [column for column in same if old[column.attnum].value.lake != column.value.lake]
    return renamed, [column for column in columns if column.attnum not in old], widened


def recast(before: TableSchema, columns: Collection[Column]) -> list[Column]:
    """Those of `columns` whose values the source has written again as a wider type, which the lake's may have been
    before."""
    old = {column.attnum: column.value for column in before.columns}
    return [c for c in columns if c.attnum in old and _kind(old[c.attnum]) != _kind(c.value)]


def _kind(value: ValueType) -> tuple[str, str]:
    return value.wire, value.lake


def described(before: TableSchema, after: TableSchema) -> str:
    """For people."""
    renamed, added, widened = between(before, after.columns)
    dropped = {column.attnum: column.name for column in before.columns}
    for column in after.columns:
        dropped.pop(column.attnum, None)
    parts = [
        *(f"column {quote_ident(column.name)} added" for column in added),
        *(f"column {quote_ident(old)} renamed to {quote_ident(new)}" for old, new in renamed.items()),
        *(f"column {quote_ident(column.name)} widened to {column.value.lake}" for column in widened),
        *(f"column {quote_ident(name)} dropped" for name in dropped.values()),
    ]
    return ", ".join(parts) or "types that are the same in the lake"


def has_columns(schema: TableSchema, relation: Relation) -> bool:
    """Whether `relation` shows exactly the columns of `schema`."""
    known = [(column.name, column.type_oid, column.typmod) for column in schema.columns]
    seen = [(column.name, column.type_oid, column.typmod) for column in relation.columns]
    # A partition may have been attached with its columns in another order.
    return known == seen if not schema.partitioned else sorted(known) == sorted(seen)


def refuse_other_table(
    record: TableRecord, relation: Relation, is_partition: Callable[[Relation], bool] = lambda _: False
) -> None:
    """SchemaChanged unless `relation` is, by id and name, the table or a leaf of it. `is_partition`: of a leaf under
    another name, whether it is that one all the same: then it was renamed, and no more."""
    schema = record.schema
    leaf = next((leaf for leaf in schema.leaves if leaf.relation_id == relation.relation_id), None)
    if leaf is None:
        raise changed(record, "the table was dropped and created again at the source")
    if (leaf.schema, leaf.name) != (relation.schema, relation.name):
        now = TableName(relation.schema, relation.name)
        what = f"{TableName(leaf.schema, leaf.name)} was renamed to {now} at the source"
        if schema.partitioned and is_partition(relation):
            return
        if schema.partitioned:
            raise changed(record, what)
        raise changed(record, what, f"name {now} in the pipeline file, then headwater load PIPELINE.yaml")


def refuse_lost_key(record: TableRecord, relation: Relation) -> None:
    """SchemaChanged unless the old tuples of `relation` carry the key."""
    schema = record.schema
    carried = {column.name for column in relation.columns if column.identity}
    if not schema.insert_only and not set(schema.key) <= carried:
        missing = ", ".join(sorted(set(schema.key) - carried))
        raise changed(record, f"its replica identity does not carry the key any more (missing: {missing})")


def refuse_difference(record: TableRecord, relation: Relation) -> None:
    """SchemaChanged unless `relation` is the registered one: same name, columns, types, and a key to find rows by."""
    refuse_other_table(record, relation)
    if not has_columns(record.schema, relation):
        raise changed(record, f"its columns changed at the source ({differences(record.schema, relation)})")
    refuse_lost_key(record, relation)


def differences(schema: TableSchema, relation: Relation) -> str:
    """What a reader of two lists of columns would see."""
    known = {column.name: (column.type_oid, column.typmod) for column in schema.columns}
    seen = {column.name: (column.type_oid, column.typmod) for column in relation.columns}
    added, gone = sorted(set(seen) - set(known)), sorted(set(known) - set(seen))
    retyped = sorted(name for name in set(known) & set(seen) if known[name] != seen[name])
    parts = [
        *([f"new columns {', '.join(added)}"] if added else []),
        *([f"columns gone: {', '.join(gone)}"] if gone else []),
        *([f"other types: {', '.join(retyped)}"] if retyped else []),
    ]
    return "; ".join(parts) or "in another order"


def changed(record: TableRecord, what: str, remedy: str = "") -> SchemaChanged:
    again = f"headwater load PIPELINE.yaml --table {record.name} --again"
    return SchemaChanged(what, where=record.name, remedy=remedy or again)


def evolved(
    record: TableRecord,
    relation: Relation,
    now: TableSchema,
    facts: ColumnFacts,
    seen: Mapping[int, int] = MappingProxyType({}),
    *,
    empty: bool = False,
) -> TableSchema:
    """The table with the columns that `relation` shows. `now` and `facts`: the source's catalog. `seen`: by relation
    the newest files that it had under its registered columns. `empty`: it had no row when its columns changed.

    SchemaChanged, with the reason, for what cannot be followed.
    """
    return _Reading(record, relation, now, facts, seen, empty=empty).schema()


def _like(shown: RelationColumn, schema: TableSchema) -> Column | None:
    wanted = (shown.name, shown.type_oid, shown.typmod)
    return next((column for column in schema.columns if (column.name, column.type_oid, column.typmod) == wanted), None)


class _Reading:
    def __init__(
        self,
        record: TableRecord,
        relation: Relation,
        now: TableSchema,
        facts: ColumnFacts,
        seen: Mapping[int, int],
        *,
        empty: bool,
    ) -> None:
        self._record, self._relation, self._now, self._facts = record, relation, now, facts
        self._seen, self._empty = seen, empty
        self._stored = record.schema
        self._old = {column.attnum: column for column in self._stored.columns}

    def schema(self) -> TableSchema:
        if self._stored.hides:
            # By their names they are hidden: the reader has let through none of such a change.
            raise self._not_followed("columns of a table with columns.hash or columns.mask are not followed")
        self._refuse_ambiguity()
        found = self._identified_all()
        gone = tuple(column for attnum, column in self._old.items() if attnum not in {c.attnum for c in found})
        self._refuse_needed(gone)
        self._refuse_other_in_place(found, gone)
        columns = tuple(self._kept(c) if c.attnum in self._old else self._added(c) for c in found)
        renamed, _, widened = between(self._stored, columns)
        for name in (*renamed, *(self._old[column.attnum].name for column in widened)):
            for done, by in (("partitioned", self._stored.partition_by), ("clustered", self._stored.cluster_by)):
                if name in by:
                    raise self._not_followed(f"the lake is {done} by {quote_ident(name)}")
        last = max(self._stored.last_attnum, *(column.attnum for column in (*self._stored.columns, *columns)))
        key = tuple(renamed.get(name, name) for name in self._stored.key)
        # Widening has rewritten the table, and is known: from here on another rewrite is to be told from it.
        leaves = (
            self._leaves_now()
            if recast(self._stored, columns) and has_columns(self._now, self._relation)
            else self._stored.leaves
        )
        # The server spells a filter with the names of now.
        spelled = self._now.row_filter or self._stored.row_filter if self._stored.where else ""
        schema = replace(self._stored, columns=columns, key=key, last_attnum=last, leaves=leaves, row_filter=spelled)
        if not has_columns(schema, self._relation):
            raise self._not_followed("two readings of it are possible")
        return schema

    def _refuse_ambiguity(self) -> None:
        if self._now.relation_id != self._stored.relation_id:
            raise changed(self._record, "the table was dropped and created again at the source")
        last = self._stored.last_attnum or max(self._old)
        if any(attnum > last for attnum in self._facts.dropped):
            raise self._not_followed("a column was added and dropped again before it could be followed")

    def _identified_all(self) -> list[Column]:
        """The columns that the message shows, in attnum order."""
        found = [self._identified(column) for column in self._relation.columns]
        attnums = [column.attnum for column in found]
        # A table's own message is in that order, a leaf's in the leaf's.
        if len(set(attnums)) < len(attnums) or (not self._stored.partitioned and attnums != sorted(attnums)):
            raise self._not_followed("columns were dropped and added again, or changed places, before it was followed")
        return sorted(found, key=lambda column: column.attnum)

    def _identified(self, shown: RelationColumn) -> Column:
        """Which column it is: one of the catalog's, or one of ours that has changed again, or is gone, since then."""
        live, known = (_like(shown, schema) for schema in (self._now, self._stored))
        # Where the catalog is what is shown there is but one reading: names may have changed places.
        if not has_columns(self._now, self._relation):
            if live is not None and known is not None and live.attnum != known.attnum:
                raise self._not_followed(f"{quote_ident(shown.name)} was dropped and added again")
            if self._stored.partitioned:
                raise self._not_followed("its columns were changed once more before it could be followed")
        column = live or known
        if column is None:
            raise self._not_followed(f"{quote_ident(shown.name)} was changed once more before it could be followed")
        return column

    def _refuse_needed(self, gone: tuple[Column, ...]) -> None:
        for column in gone:
            if column.attnum not in self._facts.dropped:
                raise self._not_followed(f"{quote_ident(column.name)} is there and not published any more")
            for use in ("key", "partition_by", "cluster_by"):
                if column.name in getattr(self._stored, use):
                    raise self._not_followed(f"{quote_ident(column.name)} of its {use} was dropped")

    def _refuse_other_in_place(self, found: list[Column], gone: tuple[Column, ...]) -> None:
        """What looks like a new column may be one that is gone: renamed, shown, and only then dropped and added
        again."""
        place = {column.name: index for index, column in enumerate(self._relation.columns)}
        kept = [c.attnum for c in sorted(found, key=lambda c: place.get(c.name, -1)) if c.attnum in self._old]
        has_own_order = kept != sorted(kept)  # a leaf's: there every place is possible
        for index, new in enumerate(found):
            if new.attnum in self._old:
                continue
            for old in gone:
                around = [c.attnum for c in (*found[:index], old, *found[index + 1 :])]
                fits = has_own_order or around == sorted(around)
                if fits and (old.type_oid, old.typmod) == (new.type_oid, new.typmod):
                    raise self._not_followed(
                        f"{quote_ident(new.name)} may be a new column, or {quote_ident(old.name)} under another name"
                    )

    def _kept(self, column: Column) -> Column:
        """A registered column under its name and type of now."""
        old = self._old[column.attnum]
        if (old.type_oid, old.typmod) == (column.type_oid, column.typmod):
            # What the pipeline file says of it now holds from the table's next load on.
            return replace(old, name=column.name, not_null=column.not_null)
        if column.on_bad_value != old.on_bad_value:
            raise self._not_followed(f"on_bad_value of {quote_ident(old.name)} is another one than at its load")
        if not is_widening(old.value, column.value):
            self._refuse_other_type(old, column)
        return replace(
            old,
            name=column.name,
            type_oid=column.type_oid,
            typmod=column.typmod,
            value=column.value,
            not_null=column.not_null,
            narrower=(*old.narrower, replace(old, narrower=())),
        )

    def _refuse_other_type(self, old: Column, column: Column) -> None:
        """Unless older rows keep their values: they lie in the lake as the new type would have them."""
        name = quote_ident(column.name)
        if column.value.lake != old.value.lake:
            lakes = f"{old.value.lake} in the lake would be {column.value.lake}"
            raise self._not_followed(f"{name} has another type: {lakes}")
        if column.value != old.value:
            raise self._not_followed(f"{name} has another type")
        if self._rewritten():
            raise self._not_followed(f"{name} has another type, and the table was rewritten")

    def _leaves_now(self) -> tuple[Leaf, ...]:
        now = self._files_now()
        return tuple(replace(leaf, relfilenode=now.get(leaf.relation_id, 0)) for leaf in self._stored.leaves)

    def _added(self, column: Column) -> Column:
        """A new column with the value that older rows have there."""
        if column.attnum <= (self._stored.last_attnum or max(self._old)):
            raise self._not_followed(f"{quote_ident(column.name)} was there before and was not replicated")
        noted = {self._facts.missing.get((leaf, column.name), "") for leaf in self._older_leaves()}
        if column.name in self._facts.unreadable:
            raise self._not_followed(f"the value that older rows have in {quote_ident(column.name)} cannot be read")
        if len(noted) > 1:
            raise self._not_followed(f"older rows have {quote_ident(column.name)} differently from leaf to leaf")
        missing = next(iter(noted), "")
        if not missing and self._rewritten():
            # A default that differs from row to row, or one that was noted till the table was rewritten (VACUUM FULL).
            raise self._not_followed(
                f"{quote_ident(column.name)} was added, and the table was rewritten: the log does not tell what its "
                "older rows hold"
            )
        return replace(column, missing=missing)

    def _older_leaves(self) -> list[int]:
        """Those that may be older than an added column. One that came after it has no note of older rows, though its
        files are those that it came with; an older one has them anew without a note."""
        noted = {relation for relation, _ in self._facts.missing}
        leaves = [leaf.relation_id for leaf in self._stored.leaves if leaf.relation_id in self._files_now()]
        return [leaf for leaf in leaves if leaf in noted or leaf in self._rewritten()] if noted else leaves

    def _rewritten(self) -> set[int]:
        """Leaves with other files than under their registered columns: every value may be another one."""
        if self._empty:
            return set()
        now = self._files_now()

        def is_older(leaf: Leaf) -> bool:
            known = (leaf.relfilenode, leaf.seen, self._seen.get(leaf.relation_id))
            return now.get(leaf.relation_id, leaf.relfilenode) in known

        return {leaf.relation_id for leaf in self._stored.leaves if not is_older(leaf)}

    def _files_now(self) -> dict[int, int]:
        return {leaf.relation_id: leaf.relfilenode for leaf in self._now.leaves}

    def _not_followed(self, why: str) -> SchemaChanged:
        what = differences(self._stored, self._relation)
        return changed(self._record, f"its columns changed at the source ({what}): {why}")
