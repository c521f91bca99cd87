"""Whether the two publications of a pipeline exist with its tables, or the role may make them so. Changes nothing."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from psycopg import errors as server_errors

from headwater.names import TableName, quote_ident
from headwater.source.catalog.catalog import CatalogTable
from headwater.source.connection import Connection, errors_named
from headwater.source.problems import Problem, error
from headwater.source.publication.parts import PublishedPart, member_list
from headwater.source.publication.publication import (
    create_statement,
    inserts_name,
    publication_problems,
    read_publication,
)
from headwater.source.slot import PLUGIN, read_slot

_READS_OLDER_CHANGES_SINCE = 180000


@errors_named("source")
def publishing_problems(
    connection: Connection, name: str, tables: Iterable[CatalogTable], parts: Mapping[TableName, PublishedPart]
) -> list[Problem]:
    """What stands in the way of publishing the `parts` of `tables`, by `name` or by its companion for inserts."""
    insert_only = [table for table in tables if table.schema.insert_only and table.name in parts]
    others = [table for table in tables if not table.schema.insert_only and table.name in parts]
    return [
        *_one(connection, name, others, parts),
        *_one(connection, inserts_name(name), insert_only, parts),
        *_updates_published(connection, name, insert_only),
    ]


@errors_named("source")
def slot_order_problems(connection: Connection, slot_name: str, publication: str) -> list[Problem]:
    """A slot that nothing was read from yet and nothing can be: before 18 a change older than a publication fails every
    reading. Looks ahead in the log, and confirms nothing."""
    slot = read_slot(connection, slot_name)
    if slot is None or slot.active or slot.loss or connection.info.server_version >= _READS_OLDER_CHANGES_SINCE:
        return []
    if slot.plugin != PLUGIN or slot.database != connection.info.dbname:
        return []  # said already
    names = ",".join(quote_ident(name) for name in (publication, inserts_name(publication)))
    peek = "select from pg_logical_slot_peek_binary_changes(%s, null, 1, 'proto_version', '1', 'publication_names', %s)"
    try:
        connection.execute(peek, (slot_name, names))
    except server_errors.UndefinedObject:
        quoted = slot_name.replace("'", "''")
        return [
            error(
                "slot_before_publication",
                f"slot {slot_name}",
                "it is older than the publication, with changes in between: this server can never read past them",
                f"SELECT pg_drop_replication_slot('{quoted}'); headwater load PIPELINE.yaml makes another, or "
                "headwater init PIPELINE.yaml --sql prints how",
            )
        ]
    except (server_errors.ObjectInUse, server_errors.QueryCanceled, server_errors.InsufficientPrivilege):
        return []  # somebody has just begun to read it, or it is too much to look through: replicate will tell
    return []


@errors_named("source")
def missing_publications(connection: Connection, slot_name: str, publication: str) -> list[Problem]:
    """What a slot that is read cannot do without before 18: at the first change that commits meanwhile every later
    reading fails, even where the missing publication would have no table."""
    slot = read_slot(connection, slot_name)
    if slot is None or slot.loss or connection.info.server_version >= _READS_OLDER_CHANGES_SINCE:
        return []
    return [
        error(
            "publication_missing",
            f"publication {quote_ident(name)}",
            "it is gone, and this server cannot read changes that commit until it is created again",
            "headwater load PIPELINE.yaml creates it; if replicate is refused even so, drop the slot that source.slot "
            "names, then headwater verify PIPELINE.yaml --repair",
        )
        for name in (publication, inserts_name(publication))
        if read_publication(connection, name) is None
    ]


def _one(
    connection: Connection, name: str, tables: Sequence[CatalogTable], every_part: Mapping[TableName, PublishedPart]
) -> list[Problem]:
    publication = read_publication(connection, name)
    parts = {table.name: every_part[table.name] for table in tables}
    if publication is None:
        return _creation(connection, name, tables, parts)
    problems = publication_problems(publication, parts)
    missing = [table for table in tables if table.name not in publication.members]
    # FOR ALL TABLES is refused by itself: its tables are no members to be added.
    if missing and not (publication.for_all_tables or publication.for_schemas):
        foreign = [table.name for table in missing if not table.relation.owned]
        if foreign or not publication.owned:
            what = "the role does not own the publication" if not publication.owned else _not_owned(foreign)
            members = member_list({table.name: parts[table.name] for table in missing})
            remedy = f"a DBA can run: ALTER PUBLICATION {quote_ident(name)} ADD TABLE {members}"
            problems.append(
                error("missing_rights", f"publication {quote_ident(name)}", f"tables are missing and {what}", remedy)
            )
    return problems


def _updates_published(connection: Connection, name: str, insert_only: Sequence[CatalogTable]) -> list[Problem]:
    """Insert-only tables that `name` publishes with their updates: these would come, and may fail at the source."""
    publication = read_publication(connection, name)
    return [
        error(
            "insert_only_published",
            str(table.name),
            f"it is insert-only, but publication {quote_ident(name)} publishes its updates and deletes",
            f"ALTER PUBLICATION {quote_ident(name)} DROP TABLE ONLY {table.name}",
        )
        for table in insert_only
        if publication is not None and not publication.owned and table.name in publication.members
    ]


def _creation(
    connection: Connection, name: str, tables: Sequence[CatalogTable], parts: Mapping[TableName, PublishedPart]
) -> list[Problem]:
    row = connection.execute(
        "select pg_catalog.has_database_privilege(current_database(), 'CREATE'), current_database()"
    ).fetchone()
    assert row is not None
    may_create, database = row
    foreign = [table.name for table in tables if not table.relation.owned]
    if may_create and not foreign:
        return []
    what = _not_owned(foreign) if may_create else f"the role may not create publications in {quote_ident(database)}"
    remedy = f"a DBA can run: {create_statement(name, connection.info.server_version, parts)}"
    return [error("missing_rights", f"publication {quote_ident(name)}", f"it does not exist and {what}", remedy)]


def _not_owned(names: Sequence[TableName]) -> str:
    return f"the role does not own {', '.join(str(name) for name in sorted(names))}"
