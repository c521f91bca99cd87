"""Which columns of a table are replicated, as what, and which of them cannot be.

Stored generated columns are in the log from server 18 on, where the publication publishes them; virtual ones never
are. Delta does not tell columns apart by case, and `_hw_…` names are Headwater's own.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace

from headwater.errors import Refused
from headwater.hidden import Hidden, fingerprint
from headwater.names import TableName, quote_ident
from headwater.pipeline_file.pipeline import Pipeline, TableEntry
from headwater.schema import SERVER_TEXT, Column
from headwater.source.catalog.identity import carried_columns
from headwater.source.catalog.relations import PARTITIONED, Attribute, CatalogRelation
from headwater.source.catalog.types import PgType, text_of, value_type
from headwater.source.problems import Problem, error, warning

RESERVED_PREFIX = "_hw_"
_NO_PARTITION_TYPES = ("float", "double", "binary", "array")
_CLUSTERED_TYPES = frozenset({"tinyint", "smallint", "int", "bigint", "date", "timestamp", "timestamp_ntz", "string"})
"""Of which each file says the least and the greatest value."""
_COLUMNS_WITH_STATISTICS = 32


def replicated_columns(
    relation: CatalogRelation,
    entry: TableEntry,
    pipeline: Pipeline,
    types: dict[int, PgType],
    publishes_generated: bool,
) -> tuple[tuple[Column, ...], list[Problem]]:
    """The columns in attnum order, and one problem per column that is left out or has no type in the lake."""
    columns: list[Column] = []
    problems: list[Problem] = []
    for attribute in relation.attributes:
        where = f"{relation.name}.{quote_ident(attribute.name)}"
        if attribute.name in entry.columns.exclude:
            continue
        if attribute.generated and not (attribute.generated == "s" and publishes_generated):
            problems.append(_left_out(where, attribute))
            continue
        policy = bad_value_policy(entry, pipeline, attribute.name)
        try:
            pg_type = replace(types[attribute.type_oid], typmod=attribute.typmod)
            hidden = _hidden(entry, pipeline, attribute.name)
            declared = entry.types.get(attribute.name)
            value = text_of(pg_type) if hidden is not None else value_type(pg_type, declared, policy, where)
        except Refused as refusal:
            problems.append(error(refusal.code, refusal.where or where, refusal.message, refusal.remedy))
            continue
        if value.wire == SERVER_TEXT:
            problems.append(_only_as_text(where, pg_type))
        columns.append(
            Column(
                attribute.name,
                attribute.attnum,
                attribute.type_oid,
                attribute.typmod,
                value,
                not_null=attribute.not_null,
                on_bad_value=policy,
                hidden=hidden,
            )
        )
    return tuple(columns), problems


def _hidden(entry: TableEntry, pipeline: Pipeline, column: str) -> Hidden | None:
    if column in entry.columns.hash:
        return Hidden("hash", fingerprint(pipeline.hash_key()))
    mask = entry.columns.mask.get(column)
    return Hidden("mask", mask) if mask is not None else None


def bad_value_policy(entry: TableEntry, pipeline: Pipeline, column: str) -> str:
    """`on_bad_value` of one column: its own, else the table's, else the pipeline's."""
    declared = entry.on_bad_value
    if isinstance(declared, str):
        return declared
    default: str = pipeline.defaults.on_bad_value
    return default if declared is None else declared.get(column, default)


def column_problems(
    relation: CatalogRelation, entry: TableEntry, columns: tuple[Column, ...], key: tuple[str, ...]
) -> list[Problem]:
    """What is wrong with names, and with what the pipeline file says about columns."""
    where = str(relation.name)
    problems = [*_name_problems(relation, entry), *_unknown_columns(relation, entry)]
    replicated = {column.name: column for column in columns}
    for name in key:
        attribute = relation.attribute(name)
        if name in entry.columns.exclude:
            message = f"the key needs {quote_ident(name)}, which columns.exclude leaves out"
            problems.append(error("key_not_replicated", where, message, "take it out of columns.exclude"))
        elif attribute is not None and attribute.generated and name not in replicated:
            message = f"the key needs {quote_ident(name)}, a generated column that the log does not carry"
            problems.append(error("key_not_replicated", where, message, "declare a key of ordinary columns"))
        elif name in _hiding(entry):
            message = f"columns.{_hiding(entry)[name]} names {quote_ident(name)} of its key"
            why = "verify and repair find a row at the source by its key, which the lake would not have"
            problems.append(error("hidden_key", where, f"{message}: {why}", "declare a key of other columns, or none"))
    for name in entry.partition_by:
        if name in replicated and replicated[name].value.lake.startswith(_NO_PARTITION_TYPES):
            message = f"partition_by {quote_ident(name)}: {replicated[name].value.lake} cannot partition a Delta table"
            problems.append(error("partition_by_type", where, message, "choose a column of another type"))
        elif name not in replicated and relation.attribute(name) is not None:
            message = f"partition_by {quote_ident(name)}: the column is not replicated"
            problems.append(error("partition_by_type", where, message, "choose another column"))
    problems += _clustering_problems(relation, entry, columns)
    if columns and set(entry.partition_by) >= set(replicated):
        message = "partition_by names every column; Delta needs one that is not a partition column"
        problems.append(error("partition_by_type", where, message, "leave a column out"))
    if not columns and not problems:
        problems.append(error("no_columns", where, "it has no column that can be replicated"))
    return problems


def _clustering_problems(relation: CatalogRelation, entry: TableEntry, columns: tuple[Column, ...]) -> list[Problem]:
    position = {column.name: (index, column) for index, column in enumerate(columns)}
    problems = []
    for name in entry.cluster_by:
        if relation.attribute(name) is None:
            continue  # said elsewhere
        remedy = "choose another column"
        if name not in position:
            why = "the column is not replicated"
        elif (lake := position[name][1].value.lake) not in _CLUSTERED_TYPES:
            why = f"files do not say which values of type {lake} they hold, so none would be left unread"
        elif position[name][0] >= _COLUMNS_WITH_STATISTICS:
            why = f"files say which values they hold of the first {_COLUMNS_WITH_STATISTICS} columns only"
            remedy = "choose another column, or exclude columns before it"
        else:
            continue
        message = f"cluster_by {quote_ident(name)}: {why}"
        problems.append(error("cluster_by_column", str(relation.name), message, remedy))
    return problems


def part_problems(relation: CatalogRelation, entry: TableEntry, holders: Sequence[CatalogRelation]) -> list[Problem]:
    """Why the source cannot publish only some columns or rows of the table, as the pipeline file wants; or the reader
    not hide them."""
    where, excluded, hiding = str(relation.name), entry.columns.exclude, _hiding(entry)
    if relation.kind == PARTITIONED and hiding:
        message = f"columns.{next(iter(hiding.values()))}: the log names a new partition without saying whose it is"
        return [error("part_of_partitioned", where, message, "list the partitions as tables of their own")]
    if not excluded and not entry.where:
        return []
    option = "columns.exclude" if excluded else "where"
    if relation.kind == PARTITIONED:
        message = f"{option}: PostgreSQL takes no column list or row filter for a table published by its partitions"
        return [error("part_of_partitioned", where, message, "list the partitions as tables of their own")]
    problems = []
    for holder in holders:
        if not excluded or entry.insert_only:
            continue
        if holder.replica_identity == "f":
            message = "columns.exclude: under REPLICA IDENTITY FULL the source's own UPDATE would fail"
            problems.append(error("excluded_identity", where, message, _another_identity(holder)))
        elif lost := sorted(set(excluded) & carried_columns(holder)):
            names = ", ".join(map(quote_ident, lost))
            message = f"columns.exclude names {names} of its replica identity: the source's own UPDATE would fail"
            problems.append(error("excluded_identity", where, message, "take it out of columns.exclude"))
    return problems


def _hiding(entry: TableEntry) -> dict[str, str]:
    """The columns that are hashed or masked, and which of the two."""
    return dict.fromkeys(entry.columns.hash, "hash") | dict.fromkeys(entry.columns.mask, "mask")


def _another_identity(relation: CatalogRelation) -> str:
    return f"ALTER TABLE {relation.name} REPLICA IDENTITY DEFAULT, or USING INDEX of its key"


def _name_problems(relation: CatalogRelation, entry: TableEntry) -> list[Problem]:
    where = str(relation.name)
    problems = []
    same: defaultdict[str, list[str]] = defaultdict(list)
    for attribute in relation.attributes:
        if attribute.name in entry.columns.exclude:
            continue
        same[attribute.name.lower()].append(attribute.name)
        if attribute.name.lower().startswith(RESERVED_PREFIX):
            message = f"the column name {quote_ident(attribute.name)} is reserved: it begins with {RESERVED_PREFIX}"
            problems.append(error("column_reserved", where, message, "rename the column"))
    for names in same.values():
        if len(names) > 1:
            message = (
                f"the columns {', '.join(map(quote_ident, names))} differ only by case, which Delta does not tell apart"
            )
            problems.append(error("column_case", where, message, "rename one of them"))
    return problems


def _unknown_columns(relation: CatalogRelation, entry: TableEntry) -> list[Problem]:
    # A pattern's policies speak of all its tables: not each of them has every column.
    per_column = (
        entry.on_bad_value if isinstance(entry.name, TableName) and isinstance(entry.on_bad_value, dict) else ()
    )
    where = str(relation.name)
    options = {
        "partition_by": entry.partition_by,
        "cluster_by": entry.cluster_by,
        "types": entry.types,
        "on_bad_value": per_column,
        "columns.hash": entry.columns.hash,
        "columns.mask": entry.columns.mask,
    }
    return [
        error("unknown_column", where, f"{option} names {quote_ident(name)}, which the table does not have")
        for option, names in options.items()
        for name in names
        if relation.attribute(name) is None
    ]


def _only_as_text(where: str, pg_type: PgType) -> Problem:
    message = (
        f"the binary form of type {pg_type} is not known to Headwater: because of it the log connection of the whole "
        "pipeline uses the text format, which costs the source and the reader more"
    )
    remedy = "nothing has to be done; a pipeline of its own for this table keeps the others in binary"
    return warning("text_format", where, message, remedy)


def _left_out(where: str, attribute: Attribute) -> Problem:
    if attribute.generated == "v":
        return warning("generated_column", where, "it is a virtual generated column, never in the log: left out")
    message = "it is a stored generated column, which this source does not publish: left out"
    return warning("generated_column", where, message, "server 18 and publish_generated_columns = stored publish it")
