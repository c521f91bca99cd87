"""Whether a table at the source still is the one that was registered, and still reaches the log.

A table that was dropped, renamed or taken out of its publication sends nothing through the log that would say so:
its silence looks like rest. So the catalog is asked, by relation id: by a running driver (`replicate.catalog_watch`),
and by every wait at the moment that it takes its target. pg_class and pg_publication_rel are open to every role.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from headwater.names import TableName, quote_ident
from headwater.source.connection import Connection, errors_named
from headwater.source.problems import Problem, error


@dataclass(frozen=True, slots=True)
class Registered:
    """A table as it was loaded: of a partitioned one the root, which is the member of the publication.

    `membership`: the one that its load waited for (see `Standing`); None: not known, any will do.
    """

    name: TableName
    relation_id: int
    publication: str
    membership: int | None = None


@dataclass(frozen=True, slots=True)
class Standing:
    """What became of it. `now`: its present name, None when it is gone. `replaced`: another relation has its name.

    `membership` tells one membership in the publication from a later one: it is the oid of its pg_publication_rel
    row, which a table that is taken out and put back gets anew. None: there is none; 0: the publication holds every
    table, or every one of the schema.
    """

    registered: Registered
    now: TableName | None
    replaced: bool
    membership: int | None


# A relation that is a member twice over (by name and by schema) is told by its own row.
_STANDINGS = """
select w.place, n.nspname::text, c.relname::text,
       exists (select from pg_catalog.pg_class o join pg_catalog.pg_namespace s on s.oid = o.relnamespace
               where s.nspname = w.schema and o.relname = w.name and o.oid <> w.id),
       (select max(coalesce(r.oid, 0::oid)::bigint) from pg_catalog.pg_publication p
        left join pg_catalog.pg_publication_rel r on r.prpubid = p.oid and r.prrelid = c.oid
        left join pg_catalog.pg_publication_namespace s on s.pnpubid = p.oid and s.pnnspid = c.relnamespace
        where p.pubname = w.publication and (r.oid is not null or s.oid is not null or p.puballtables))
from unnest(%s::text[], %s::text[], %s::oid[], %s::text[]) with ordinality w(schema, name, id, publication, place)
left join pg_catalog.pg_class c on c.oid = w.id left join pg_catalog.pg_namespace n on n.oid = c.relnamespace
order by w.place
"""


@errors_named("source")
def read_standings(connection: Connection, registered: Iterable[Registered]) -> tuple[Standing, ...]:
    """One query for all of them, in their order; none when there is nothing to ask for."""
    tables = list(registered)
    if not tables:
        return ()
    rows = connection.execute(
        _STANDINGS,
        [
            [table.name.schema for table in tables],
            [table.name.name for table in tables],
            [table.relation_id for table in tables],
            [table.publication for table in tables],
        ],
    )
    return tuple(
        Standing(tables[place - 1], TableName(schema, name) if name is not None else None, replaced, membership)
        for place, schema, name, replaced, membership in rows
    )


def standing_problem(standing: Standing) -> Problem | None:
    """Why the lake's table can follow this one no more, with a remedy that cures; None: all is as it was."""
    name, publication = standing.registered.name, quote_ident(standing.registered.publication)
    again = f"headwater load PIPELINE.yaml --table {name} --again"
    if standing.now is None and standing.replaced:
        return error("table_recreated", str(name), "the table was dropped and created again at the source", again)
    if standing.now is None:
        remedy = f"take {name} out of the pipeline file (of a pattern: exclude it), then headwater load PIPELINE.yaml"
        return error("table_dropped", str(name), "the table was dropped at the source", remedy)
    if standing.now != name and standing.replaced:
        message = f"{name} was renamed to {standing.now} at the source, and another relation has its name now"
        return error("table_renamed", str(name), message, again)
    if standing.now != name:
        message = f"{name} was renamed to {standing.now} at the source"
        remedy = f"name {standing.now} in the pipeline file, then headwater load PIPELINE.yaml"
        return error("table_renamed", str(name), message, remedy)
    if standing.membership is None:
        message = f"it is not in the publication {publication} any more: its changes do not reach the log"
        return error("table_unpublished", str(name), message, again)
    if standing.registered.membership not in (None, standing.membership):
        message = f"it left the publication {publication} and came back: what was changed in between is not in the log"
        return error("table_published_anew", str(name), message, again)
    return None
