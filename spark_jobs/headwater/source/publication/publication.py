"""The two publications of a pipeline: `<name>` with every operation, `<name>_inserts` for insert-only tables.

Leaves are published as themselves, so the log names the relation that holds a row. Nothing is ever published
`FOR ALL TABLES` or `IN SCHEMA`: a table that somebody creates without a key would lose its UPDATE and DELETE the
moment it exists. Headwater writes its mark into the comment of what it creates, and `drop_publications` takes only
that. A publication may also be made by a DBA; then it is checked, used and left alone.

A member is added under a `lock_timeout` and again after a pause, so that our lock never stands long in a queue.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import psycopg
from psycopg import errors as pg

from headwater.errors import Refused
from headwater.names import INSERTS_SUFFIX, TableName, quote_ident
from headwater.source.catalog.identity import (
    GENERATED_PUBLISHED_SINCE,
    identity_remedy,
    why_writers_would_fail,
)
from headwater.source.catalog.relations import PARTITIONED, Listed, descendants, list_relations, read_relations
from headwater.source.connection import Connection, errors_named
from headwater.source.problems import Problem, error, refuse_errors
from headwater.source.publication.lock import run_with_lock_timeout
from headwater.source.publication.parts import Member, PublishedPart, member_list, narrowed_members, part_problems

_MARK = "made by headwater, pipeline "
_MAX_NAME_BYTES = 63
_ALL = frozenset({"insert", "update", "delete", "truncate"})
_INSERTS = frozenset({"insert", "truncate"})


@dataclass(frozen=True, slots=True)
class Publication:
    """A publication as it stands. `made_for`: the pipeline that Headwater made it for, None if somebody else did;
    `owned` says whether the current role may alter it."""

    name: str
    owned: bool
    for_all_tables: bool
    for_schemas: bool
    operations: frozenset[str]
    via_root: bool
    publishes_generated: bool
    made_for: str | None
    members: Mapping[TableName, Member]


def inserts_name(publication: str) -> str:
    """The companion for insert-only tables; `Refused` when PostgreSQL would cut its name off."""
    name = publication + INSERTS_SUFFIX
    if len(name.encode()) > _MAX_NAME_BYTES:
        message = f"the publication name {publication!r} is too long: with {INSERTS_SUFFIX!r} it exceeds 63 bytes"
        raise Refused(message, code="bad_configuration", where="source.publication", remedy="choose a shorter name")
    return name


@errors_named("source")
def read_publication(connection: Connection, name: str) -> Publication | None:
    generated = "pubgencols = 's'" if connection.info.server_version >= GENERATED_PUBLISHED_SINCE else "false"
    row = connection.execute(
        f"""
        select p.oid, pg_catalog.pg_has_role(p.pubowner, 'USAGE'), puballtables,
               exists (select from pg_catalog.pg_publication_namespace s where s.pnpubid = p.oid),
               pubinsert, pubupdate, pubdelete, pubtruncate, pubviaroot, {generated},
               pg_catalog.obj_description(p.oid, 'pg_publication')
        from pg_catalog.pg_publication p where pubname = %s
        """,
        [name],
    ).fetchone()
    if row is None:
        return None
    oid, owned, for_all, for_schemas, insert, update, delete, truncate, via_root, publishes_generated, comment = row
    flags = {"insert": insert, "update": update, "delete": delete, "truncate": truncate}
    members = connection.execute(
        """
        select n.nspname::text, c.relname::text, r.prattrs::int2[], pg_catalog.pg_get_expr(r.prqual, r.prrelid)
        from pg_catalog.pg_publication_rel r join pg_catalog.pg_class c on c.oid = r.prrelid
        join pg_catalog.pg_namespace n on n.oid = c.relnamespace where r.prpubid = %s
        """,
        [oid],
    ).fetchall()
    return Publication(
        name=name,
        owned=owned,
        for_all_tables=for_all,
        for_schemas=for_schemas,
        operations=frozenset(operation for operation, published in flags.items() if published),
        via_root=via_root,
        publishes_generated=publishes_generated,
        made_for=comment.removeprefix(_MARK) if comment and comment.startswith(_MARK) else None,
        members={
            TableName(schema, table): Member(frozenset(columns) if columns is not None else None, row_filter or "")
            for schema, table, columns, row_filter in members
        },
    )


def published_tables(connection: Connection, name: str) -> frozenset[TableName]:
    """The members of publication `name`, partitioned tables as themselves; empty when there is no such publication."""
    publication = read_publication(connection, name)
    return frozenset(publication.members) if publication else frozenset()


def create_statement(name: str, version: int, tables: Mapping[TableName, PublishedPart] | None = None) -> str:
    """The statement that creates publication `name` as Headwater wants it; the `_inserts` one by its name."""
    operations = "insert, truncate" if name.endswith(INSERTS_SUFFIX) else "insert, update, delete, truncate"
    options = f"publish = '{operations}', publish_via_partition_root = false"
    if version >= GENERATED_PUBLISHED_SINCE:
        options += ", publish_generated_columns = stored"
    members = member_list(tables or {})
    return f"CREATE PUBLICATION {quote_ident(name)}{' FOR TABLE ' + members if members else ''} WITH ({options})"


def mark_statement(name: str, pipeline: str) -> str:
    """The statement that says of publication `name` what it was made for: `drop` takes it away again."""
    comment = f"{_MARK}{pipeline}".replace("'", "''")
    return f"COMMENT ON PUBLICATION {quote_ident(name)} IS '{comment}'"


def publication_problems(
    publication: Publication, wanted: Mapping[TableName, PublishedPart] | None = None
) -> list[Problem]:
    """Why an existing publication cannot serve, each with the statement that changes it. `wanted`: what of its tables
    is to be published; a publication of our own is altered by a load, so nothing is said of its parts."""
    name, where = quote_ident(publication.name), f"publication {quote_ident(publication.name)}"
    needed = _INSERTS if publication.name.endswith(INSERTS_SUFFIX) else _ALL
    again = f"DROP PUBLICATION {name}, and let Headwater create it (or create it for the listed tables only)"
    problems = []
    if publication.for_all_tables or publication.for_schemas:
        kind = "FOR ALL TABLES" if publication.for_all_tables else "FOR TABLES IN SCHEMA"
        message = f"it is {kind}: a new table without a key could not be updated at the source"
        problems.append(error("publication_too_wide", where, message, again))
    if publication.operations != needed:
        operations = ", ".join(sorted(needed))
        message = f"it publishes {', '.join(sorted(publication.operations)) or 'nothing'}; needed is {operations}"
        problems.append(
            error("publication_operations", where, message, f"ALTER PUBLICATION {name} SET (publish = '{operations}')")
        )
    if publication.via_root:
        message = "publish_via_partition_root is on, which hides the partition that a row lies in"
        remedy = f"ALTER PUBLICATION {name} SET (publish_via_partition_root = false)"
        problems.append(error("publication_via_root", where, message, remedy))
    for table, part in sorted((wanted or {}).items()):
        member = publication.members.get(table)
        if member is not None and not publication.owned:
            problems += part_problems(name, table, member, part)
    return problems


@errors_named("source")
def ensure_publications(
    connection: Connection, name: str, *, pipeline: str, wanted: Mapping[TableName, PublishedPart] | None = None
) -> bool:
    """Create whichever of the two publications is absent, empty; whether one was created. `wanted` as
    `publication_problems` has it.

    Idempotent. `Refused` when an existing one cannot serve, or when the right to create one is missing.
    """
    both = (name, inserts_name(name))
    existing = {each: read_publication(connection, each) for each in both}
    refuse_errors(problem for each in existing.values() if each for problem in publication_problems(each, wanted))
    absent = [each for each in both if existing[each] is None]
    statements = [create_statement(each, connection.info.server_version) for each in absent]
    try:
        with connection.transaction():
            for each, statement in zip(absent, statements, strict=True):
                connection.execute(statement)
                connection.execute(mark_statement(each, pipeline))
    except pg.InsufficientPrivilege as reason:
        raise missing_rights(
            f"the role may not create publications in {connection.info.dbname}", statements
        ) from reason
    except (pg.DuplicateObject, pg.UniqueViolation):
        # Another process made them between our look and our statement: judge what is there now.
        return ensure_publications(connection, name, pipeline=pipeline, wanted=wanted)
    return bool(absent)


@errors_named("source")
def add_tables(
    connection: Connection,
    publication: str,
    names: Iterable[TableName],
    *,
    parts: Mapping[TableName, PublishedPart] | None = None,
    wait_seconds: float = 60.0,
) -> int:
    """Publish `names` (those not yet members) and return `pg_snapshot_xmax` as seen after the commit. `parts`: what of
    them, where it is not everything; one of which something else is published is published anew.

    Transactions older than that may deliver only part of their rows: the caller waits them out before it takes a
    capture point. It is returned also when nothing was added: an earlier attempt may have died right after its
    commit. `Refused`, with nothing changed, when the source's own UPDATE or DELETE would fail from now on, or a
    right is missing; `Transient` when locks were not to be had within `wait_seconds`.
    """
    wanted = {name: (parts or {}).get(name, PublishedPart()) for name in names}
    alter = f"ALTER PUBLICATION {quote_ident(publication)}"

    def differing() -> tuple[list[TableName], dict[TableName, PublishedPart]]:
        """Members with another part, and what is to be added."""
        members = _existing(connection, publication).members
        other = [name for name in sorted(wanted) if name in members and not wanted[name].is_published_by(members[name])]
        return other, {name: part for name, part in wanted.items() if name in other or name not in members}

    current = _existing(connection, publication)
    _, missing = differing()
    if missing:

        def add() -> None:
            other, now = differing()
            if other:
                connection.execute(f"{alter} DROP TABLE {', '.join(f'ONLY {table}' for table in other)}")
            if now:
                connection.execute(f"{alter} ADD TABLE {member_list(now)}")
            # Judged behind the ALTER, whose lock keeps keys and identities as they are until we commit.
            if "update" in current.operations:
                refuse_errors(_writers_that_would_fail(connection, current, sorted(missing)))

        other, _ = differing()
        away = f"{alter} DROP TABLE {', '.join(f'ONLY {table}' for table in other)}; " if other else ""
        statement = f"{away}{alter} ADD TABLE {member_list(missing)}"
        _alter(connection, statement, sorted(missing), add, wait_seconds)
    row = connection.execute("select pg_snapshot_xmax(pg_current_snapshot())::text::bigint").fetchone()
    assert row is not None
    return int(row[0])


@errors_named("source")
def remove_table(connection: Connection, publication: str, name: TableName, *, wait_seconds: float = 60.0) -> bool:
    """Take `name` out of `publication`; whether it was a member. Errors as `add_tables`."""
    statement = f"ALTER PUBLICATION {quote_ident(publication)} DROP TABLE ONLY {name}"

    def remove() -> None:
        if name in published_tables(connection, publication):
            connection.execute(statement)

    if name not in published_tables(connection, publication):
        return False
    _alter(connection, statement, [name], remove, wait_seconds)
    return True


@errors_named("source")
def drop_publications(connection: Connection, name: str, *, pipeline: str) -> tuple[str, ...]:
    """Drop those of the two publications that were made for `pipeline`, as far as the role owns them; their names.
    Idempotent."""
    both = [read_publication(connection, each) for each in (name, inserts_name(name))]
    dropped = tuple(each.name for each in both if each is not None and each.made_for == pipeline and each.owned)
    statements = [f"DROP PUBLICATION IF EXISTS {quote_ident(each)}" for each in dropped]
    try:
        with connection.transaction():
            for statement in statements:
                connection.execute(statement)
    except pg.InsufficientPrivilege as reason:
        raise missing_rights("the role does not own the publication", statements) from reason
    return dropped


def missing_rights(message: str, statements: Sequence[str]) -> Refused:
    """The refusal that hands a DBA the exact statements."""
    remedy = "a DBA can run: " + "; ".join(statements)
    return Refused(message, code="missing_rights", where="publication", remedy=remedy)


def _existing(connection: Connection, name: str) -> Publication:
    publication = read_publication(connection, name)
    if publication is None:
        remedy = create_statement(name, connection.info.server_version)
        raise Refused(f"publication {quote_ident(name)} does not exist", code="publication_missing", remedy=remedy)
    return publication


def _alter(
    connection: Connection, statement: str, names: Sequence[TableName], act: Callable[[], None], wait_seconds: float
) -> None:
    try:
        run_with_lock_timeout(connection, names, act, wait_seconds)
    except pg.InsufficientPrivilege as reason:
        message = "changing a publication needs its ownership, adding a table also that of the table"
        raise missing_rights(message, [statement]) from reason
    except (pg.UndefinedTable, pg.InvalidSchemaName) as reason:
        raise Refused(
            f"a table to publish does not exist ({reason.diag.message_primary})", code="table_missing"
        ) from reason
    except (psycopg.ProgrammingError, psycopg.DataError, psycopg.NotSupportedError) as reason:
        if " WHERE (" not in statement:
            message = f"the server does not publish it: {reason.diag.message_primary}"
            raise Refused(message, code="not_a_table") from reason
        raise Refused(
            f"the server does not publish it so: {reason.diag.message_primary}",
            code="bad_row_filter",
            where=", ".join(map(str, names)),
            remedy="correct `where` of the table in the pipeline file",
        ) from reason


def _writers_that_would_fail(
    connection: Connection, publication: Publication, names: Sequence[TableName]
) -> list[Problem]:
    listed = {relation.name: relation for relation in list_relations(connection)}
    roots = [listed[name].relation_id for name in names if name in listed]
    below = descendants(connection, [i for i in roots if _is_partitioned(listed.values(), i)])
    relations = read_relations(connection, [*roots, *(leaf for leaves in below.values() for leaf in leaves)])
    narrowed = narrowed_members(connection, publication.name)
    problems = []
    for relation in relations.values():
        if relation.kind == PARTITIONED:
            continue
        version = connection.info.server_version
        reason = why_writers_would_fail(relation, version, publication.publishes_generated)
        if reason is None and relation.relation_id in narrowed:
            reason = narrowed[relation.relation_id].why_writers_would_fail(relation)
        if reason:
            message = f"published, its UPDATE and DELETE would fail at the source: {reason}"
            problems.append(error("no_identity", str(relation.name), message, identity_remedy(relation)))
    return problems


def _is_partitioned(listed: Iterable[Listed], relation_id: int) -> bool:
    return any(relation.relation_id == relation_id and relation.kind == PARTITIONED for relation in listed)
