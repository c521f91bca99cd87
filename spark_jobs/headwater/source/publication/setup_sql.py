"""The SQL that gives a pipeline what it needs at the source, for a DBA who lets no tool create anything there.

Least privilege: the role logs in, reads the log and the pipeline's tables, owns nothing and may make nothing. What is
there already is left out, but for grants, which may be run twice. In this order, since a slot that is older than its
publication meets changes in the log from before there was one, and the server refuses to decode them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from headwater.names import quote_ident
from headwater.pipeline_file.pipeline import Pipeline
from headwater.source.catalog.catalog import Judged, grant_select
from headwater.source.catalog.relations import PARTITIONED, CatalogRelation
from headwater.source.connection import Connection, errors_named
from headwater.source.publication.parts import PublishedPart, member_list
from headwater.source.publication.publication import create_statement, inserts_name, mark_statement, read_publication
from headwater.source.settings import REPLICATION_ROLES, setting_changes
from headwater.source.slot import create_statement as create_slot_statement
from headwater.source.slot import read_slot


@errors_named("source")
def setup_sql(connection: Connection, pipeline: Pipeline, tables: Sequence[Judged], role: str) -> str:
    """A script of plain SQL, a line to each statement and comment. `role`: the pipeline's, made if need be."""
    database = quote_ident(connection.info.dbname)
    lines = [
        f"-- What the pipeline {pipeline.name} needs. Run it as a superuser in the database {_comment(database)},",
        "-- each statement on its own: not in one transaction.",
        *_settings(connection, pipeline),
        *_role(connection, role, tables),
        *_rights(database, role, tables),
        *_publications(connection, pipeline, tables),
        *_slot(connection, pipeline),
    ]
    return "\n".join(lines) + "\n"


def _settings(connection: Connection, pipeline: Pipeline) -> list[str]:
    changes = setting_changes(connection, read_slot(connection, pipeline.source.slot))
    needed = [change for change in changes if not change.only_warning]
    advised = [change for change in changes if change.only_warning]
    lines = []
    if needed:
        lines += ["", "-- Settings of the server (a managed service has them in its parameter group)."]
        for change in needed:
            lines += [f"-- {change.message}", f"{change.statement};"]
        restart = any(change.restart for change in needed)
        lines.append("-- Now restart the server, then go on." if restart else "SELECT pg_reload_conf();")
    if advised:
        # They hold for all that the server does: whoever runs this for one pipeline must want them, too.
        lines += ["", "-- Recommended. It holds for the whole server, so decide first: remove the -- to run it."]
        for change in advised:
            lines += [f"-- {change.message}", f"-- {change.statement};"]
        lines.append("-- SELECT pg_reload_conf();")
    return lines


def _role(connection: Connection, role: str, tables: Iterable[Judged]) -> list[str]:
    name = quote_ident(role)
    row = connection.execute(
        """
        select r.rolcanlogin, r.rolsuper, r.rolreplication, r.rolbypassrls,
               array(select g.rolname::text from pg_catalog.pg_roles g where g.rolname = any(%s)
                     and pg_catalog.pg_has_role(r.oid, g.oid, 'USAGE'))
        from pg_catalog.pg_roles r where r.rolname = %s
        """,
        [list(REPLICATION_ROLES), role],
    ).fetchone()
    may_log_in, superuser, replicates, bypasses, granted = row or (False, False, False, False, [])
    handed_out = connection.execute(
        "select rolname::text from pg_catalog.pg_roles where rolname = any(%s)", [list(REPLICATION_ROLES)]
    ).fetchall()
    lines = ["", "-- The role: it logs in, reads the log, and nothing else."]
    if row is None:
        lines.append(f"CREATE ROLE {name} LOGIN{'' if handed_out else ' REPLICATION'};")
        lines.append(f"-- Its password is yours to set; psql asks for it: \\password {_comment(name)}")
    elif not may_log_in or not (superuser or replicates or granted or handed_out):
        lines.append(f"ALTER ROLE {name} LOGIN{'' if handed_out else ' REPLICATION'};")
    if not (superuser or replicates or granted):
        lines += [f"GRANT {quote_ident(group)} TO {name};" for (group,) in handed_out]
    hidden = [r.name for one in tables for r in (one.relation, *one.holders) if _hides_rows_from(r, role)]
    if hidden and not (superuser or bypasses):
        listed = ", ".join(map(str, dict.fromkeys(hidden)))
        lines.append(
            f"-- Row-level security would hide rows of {_comment(listed)} from it, and a load would miss them."
        )
        lines.append(f"ALTER ROLE {name} BYPASSRLS;")
    return lines


def _hides_rows_from(relation: CatalogRelation, role: str) -> bool:
    return relation.row_security and (relation.owner != role or relation.row_security_forced)


def _rights(database: str, role: str, tables: Iterable[Judged]) -> list[str]:
    relations = {r.name: r for one in tables for r in (one.relation, *one.holders)}
    name = quote_ident(role)
    schemas = ", ".join(quote_ident(schema) for schema in sorted({table.schema for table in relations}))
    lines = ["", f"GRANT CONNECT ON DATABASE {database} TO {name};"]
    if relations:
        lines.append(f"GRANT USAGE ON SCHEMA {schemas} TO {name};")
        part = {one.relation.name: one for one in tables if one.entry.columns.exclude}
        if whole := sorted(set(relations) - set(part)):
            lines.append(f"GRANT SELECT ON TABLE {', '.join(map(str, whole))} TO {name};")
        lines += [f"{grant_select([str(table)], one.entry, one.columns)} TO {name};" for table, one in part.items()]
    if any(relation.kind == PARTITIONED for relation in relations.values()):
        lines.append(
            f"-- A partition that is added later needs it as well: GRANT SELECT ON TABLE ... TO {_comment(name)}"
        )
    lines.append("-- Not needed: with it `headwater doctor`, the pages and the metric of the oldest transaction see")
    lines.append("-- how old the open transactions of other roles are.")
    lines.append(f"-- GRANT pg_read_all_stats TO {_comment(name)};")
    return lines


def _publications(connection: Connection, pipeline: Pipeline, tables: Iterable[Judged]) -> list[str]:
    name = pipeline.source.publication
    lines = [
        "",
        "-- What is published. Both are needed, the second one for insert-only tables.",
        "-- By the comments `headwater drop` knows them again.",
    ]
    for insert_only, each in ((False, name), (True, inserts_name(name))):
        parts = {one.relation.name: _part(one) for one in tables if bool(one.entry.insert_only) == insert_only}
        publication = read_publication(connection, each)
        if publication is None:
            lines.append(f"{create_statement(each, connection.info.server_version, parts)};")
            lines.append(f"{mark_statement(each, pipeline.name)};")
            continue
        missing = {table: part for table, part in parts.items() if table not in publication.members}
        if missing:
            lines.append(f"ALTER PUBLICATION {quote_ident(each)} ADD TABLE {member_list(missing)};")
    return lines


def _part(table: Judged) -> PublishedPart:
    return PublishedPart(table.columns if table.entry.columns.exclude else None, table.entry.where)


def _slot(connection: Connection, pipeline: Pipeline) -> list[str]:
    slot = pipeline.source.slot
    if read_slot(connection, slot) is not None:
        return []
    statement = create_slot_statement(slot, connection.info.server_version, pipeline.source.failover)
    return [
        "",
        "-- The slot, last. The server keeps its log from here on: load soon, or take the slot away again with",
        f"-- SELECT pg_drop_replication_slot('{slot}'). Headwater makes it itself if it is not there.",
        f"{statement};",
    ]


def _comment(text: str) -> str:
    """`text` on one line: a name may hold a line's end, and what follows would be run."""
    return " ".join(text.split())
