"""Changes of the source's catalog that send nothing through the log, noticed while a driver runs.

A table that is dropped, renamed, set UNLOGGED or taken out of its publication falls silent; one whose key is dropped
makes the *source's own* UPDATE and DELETE fail, as long as we publish it. `poll` is called once a second: a digest of
the catalog rows that matter, in one query, and only when it has changed the whole judgement. A table without a usable
key leaves the publication here and at once; everything else that was found waits in `take` for the driver's main
thread, which suspends the tables, also where stored values have another text now (a renamed label of an enum). Changed
columns are the business of the log's Relation messages, detached and attached partitions of nobody yet.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

from headwater.errors import HeadwaterError, Refused, SchemaChanged
from headwater.lake.registry import TableRecord
from headwater.log.blocks import Ddl
from headwater.names import quote_ident
from headwater.pipeline_file.pipeline import Pipeline
from headwater.source.catalog.identity import carried_columns, choose_key, identity_remedy, why_writers_would_fail
from headwater.source.catalog.meanings import MEANINGS, of_users, other_meanings, read_meanings
from headwater.source.catalog.relations import (
    ORDINARY,
    PARTITIONED,
    CatalogRelation,
    descendants,
    one_snapshot,
    read_relations,
)
from headwater.source.catalog.standing import Standing, read_standings, standing_problem
from headwater.source.connection import Connection, errors_named
from headwater.source.publication.parts import Narrowed, narrowed_members
from headwater.source.publication.publication import (
    Publication,
    inserts_name,
    publication_problems,
    read_publication,
    remove_table,
)
from headwater.source.snapshots import all_visible
from headwater.waiting.source_state import registered

log = logging.getLogger(__name__)

_ALARM_SECONDS = 60.0
VISIBLE_SECONDS = 10.0
"""How long what the log has told of is waited for: a commit is in the log before other sessions see it."""
_VISIBLE_LOOK_SECONDS = 0.02
_CHANGED = "headwater reload PIPELINE.yaml --changed"

_DIGEST = f"""
select md5(concat_ws('|',
    (select string_agg(concat_ws(',', c.oid, n.nspname, c.relname, c.relreplident, c.relpersistence, c.relnatts,
                                 c.relfilenode), ';' order by c.oid)
     from pg_catalog.pg_class c join pg_catalog.pg_namespace n on n.oid = c.relnamespace
     where c.oid = any(%(ids)s::oid[])),
    (select string_agg(concat_ws(',', i.indexrelid, i.indisprimary, i.indimmediate, i.indisvalid, i.indislive,
                                 i.indisreplident, i.indpred is null), ';' order by i.indexrelid)
     from pg_catalog.pg_index i where i.indrelid = any(%(ids)s::oid[]) and i.indisunique),
    (select string_agg(concat_ws(',', a.attrelid, a.attnum, a.attname), ';' order by a.attrelid, a.attnum)
     from pg_catalog.pg_attribute a
     where a.attrelid = any(%(roots)s::oid[]) and a.attnum > 0 and not a.attisdropped),
    (select string_agg(concat_ws(',', p.oid, p.pubname, p.puballtables, p.pubinsert, p.pubupdate, p.pubdelete,
                                 p.pubtruncate, p.pubviaroot), ';' order by p.oid)
     from pg_catalog.pg_publication p where p.pubname = any(%(publications)s)),
    (select string_agg(concat_ws(',', r.oid, r.prrelid, r.prqual is null, r.prattrs is null), ';' order by r.oid)
     from pg_catalog.pg_publication_rel r join pg_catalog.pg_publication p on p.oid = r.prpubid
     where p.pubname = any(%(publications)s) and r.prrelid = any(%(ids)s::oid[])),
    (select string_agg(s.oid::text, ';' order by s.oid)
     from pg_catalog.pg_publication_namespace s join pg_catalog.pg_publication p on p.oid = s.pnpubid
     where p.pubname = any(%(publications)s)),
    (select string_agg(concat_ws(',', m.root, m.key, m.value), ';' order by m.root, m.key) from ({MEANINGS}) m)))
"""


@dataclass(frozen=True, slots=True)
class _Facts:
    """The catalog under one snapshot: what the judgement reads."""

    version: int
    standings: tuple[Standing, ...]
    relations: dict[int, CatalogRelation]
    below: dict[int, tuple[int, ...]]
    publications: dict[str, Publication | None]
    narrowed: dict[int, Narrowed]
    meanings: dict[int, dict[str, str]]

    def meanings_of(self, record: TableRecord) -> dict[str, str]:
        types = (column.type_oid for column in record.schema.columns)
        return {key: value for oid in types for key, value in self.meanings.get(oid, {}).items()}

    def holders(self, root: CatalogRelation) -> list[CatalogRelation]:
        if root.kind != PARTITIONED:
            return [root]
        found = (self.relations.get(i) for i in self.below.get(root.relation_id, ()))
        return [relation for relation in found if relation is not None and relation.kind == ORDINARY]


class CatalogWatch:
    """Watches the tables that `records` gives, the registry's as it is then."""

    def __init__(self, pipeline: Pipeline, records: Callable[[], Mapping[str, TableRecord]]) -> None:
        self._pipeline = pipeline
        self._records = records
        self._both = (pipeline.source.publication, inserts_name(pipeline.source.publication))
        self._seen: tuple[str, list[TableRecord]] | None = None  # what the last judgement was made of
        self._known: set[tuple[str, int]] = set()  # found already, by incarnation: one finding a table is enough
        self._alarms: dict[str, float] = {}
        self._files: dict[int, int] = {}  # new files that were told of, by relation
        self._told: set[int] = set()  # relations that DDL has written anew, as the log has said since the last look
        self._unseen: set[int] = set()  # transactions (32 bit) that told of them, until they are visible
        self._marked: dict[int, int] = {}  # by relation the files that such DDL made
        self._newest: dict[int, int] = {}  # the highest attnum of each table at the last look
        self._for_generated: dict[int, int] = {}  # by relation the files that came with a generated column
        self.files_seen: dict[int, int] = {}
        """By relation the newest files under the columns that are registered."""
        self._meanings: dict[tuple[str, int], dict[str, str]] = {}  # by name and incarnation, with those that came
        self._learned: dict[str, tuple[tuple[str, str], ...]] = {}  # meanings that came since the last `learned`
        self._looking = threading.Lock()
        self._again = False
        self._complained = 0.0
        self._lock = threading.Lock()
        self._found: list[tuple[str, SchemaChanged]] = []

    def look(self, connection: Connection) -> None:
        """Look once, over an autocommit connection."""
        with self._looking:
            self._look(connection)

    def look_behind(self, ddl: Ddl, xids: Collection[int], connection: Connection) -> None:
        """Look once, behind DDL that the log has told of in the transactions `xids` (32 bit), over an autocommit
        connection. It is waited for until they are visible, `VISIBLE_SECONDS` at most; if they are not by then (a
        synchronous standby does not answer), nobody else has seen or changed the tables either, and a later look of
        `poll` judges them."""
        deadline = time.monotonic() + VISIBLE_SECONDS
        while not all_visible(connection, xids) and time.monotonic() < deadline:
            time.sleep(_VISIBLE_LOOK_SECONDS)
        with self._looking:
            self._told |= ddl.rewritten
            self._unseen |= set(xids)
            self._seen = None
            self._look(connection)

    def _look(self, connection: Connection) -> None:
        records = dict(self._records())
        tables = {name: record for name, record in records.items() if record.schemas}
        ids = {leaf.relation_id for record in tables.values() for leaf in record.schema.leaves}
        roots = {record.schema.relation_id for record in tables.values() if record.schema.partitioned}
        types = of_users(column.type_oid for record in tables.values() for column in record.schema.columns)
        digest = self._read_digest(connection, ids | {r.schema.relation_id for r in tables.values()}, roots, types)
        if (digest, self._suspected(tables)) == self._seen and not self._retry_due():
            return
        # Before the catalog is read: what is visible afterwards only may not be in it.
        visible = all_visible(connection, self._unseen)
        self._again = not visible
        facts = self._read_facts(connection, tables, types)
        self._note_generated(tables, facts)
        if visible:
            self._unseen.clear()
            self._mark(records, facts)
        self._judge_all(connection, tables, facts)
        self._learn(tables, facts)
        self._seen = (digest, self._suspected(tables))

    def _suspected(self, tables: Mapping[str, TableRecord]) -> list[TableRecord]:
        """Tables that DDL has written anew: judged again when the registry knows more of them."""
        suspects = self._told | set(self._marked)
        return [r for r in tables.values() if any(leaf.relation_id in suspects for leaf in r.schema.leaves)]

    def poll(self, connection: Connection) -> None:
        """Look again and again: only the loss of `connection` is raised, anything else is logged and tried again."""
        try:
            self.look(connection)
        except Exception as reason:
            if connection.closed:
                raise
            if time.monotonic() - self._complained > _ALARM_SECONDS:
                self._complained = time.monotonic()
                log.warning("the source's catalog could not be watched, trying again: %s", reason)

    def take(self) -> list[tuple[str, SchemaChanged]]:
        """What was found since the last call: tables to suspend, and why."""
        with self._lock:
            found, self._found = self._found, []
        return found

    def learned(self) -> dict[str, tuple[tuple[str, str], ...]]:
        """By table all its meanings, where some came since the last call; a driver that was stopped compares with what
        the registry has of them."""
        with self._lock:
            learned, self._learned = self._learned, {}
        return learned

    @errors_named("source")
    def _read_digest(
        self, connection: Connection, ids: Iterable[int], roots: Iterable[int], types: Sequence[int]
    ) -> str:
        asked = {"ids": sorted(ids), "roots": sorted(roots), "publications": list(self._both), "types": types}
        row = connection.execute(_DIGEST, asked).fetchone()
        assert row is not None
        return str(row[0])

    def _retry_due(self) -> bool:
        return self._again or any(time.monotonic() - at > _ALARM_SECONDS for at in self._alarms.values())

    @errors_named("source")
    def _read_facts(self, connection: Connection, tables: Mapping[str, TableRecord], types: Sequence[int]) -> _Facts:
        asked = registered(tables.values(), self._pipeline.source.publication)
        with one_snapshot(connection):
            standings = read_standings(connection, asked)
            below = descendants(
                connection, [record.schema.relation_id for record in tables.values() if record.schema.partitioned]
            )
            ids = {table.relation_id for table in asked} | {i for leaves in below.values() for i in leaves}
            return _Facts(
                connection.info.server_version,
                standings,
                read_relations(connection, ids),
                below,
                {name: read_publication(connection, name) for name in self._both},
                narrowed_members(connection, self._both[0]),  # the other publishes inserts, which have no old rows
                read_meanings(connection, types),
            )

    def _judge_all(self, connection: Connection, tables: Mapping[str, TableRecord], facts: _Facts) -> None:
        failing = set()
        for (name, record), standing in zip(tables.items(), facts.standings, strict=True):
            self._tell_of_new_files(name, record, facts)
            problem = self._silence(name, record, standing, facts)
            # Also of a table that is suspended or was removed: as long as we publish it, its writers fail.
            keyless = _key_problem(record, standing, facts)
            if keyless is not None and keyless.writers_fail:
                done, sql = self._unpublish(connection, standing, facts)
                keyless = keyless.unpublished() if done else keyless.still_published(sql)
                if not done:
                    failing.add(name)
                    self._alarm(name, keyless)
            finding = problem or (keyless.error(name) if keyless is not None else None)
            seen = (name, record.incarnation)
            if finding is not None and record.state == "loading":
                self._again = True  # the load may have looked before that
            if finding is not None and record.is_followed and seen not in self._known:
                self._known.add(seen)
                log.warning("%s: found in the source's catalog: %s", name, finding.message)
                with self._lock:
                    self._found.append((name, finding))
        self._alarms = {name: at for name, at in self._alarms.items() if name in failing}

    def _learn(self, tables: Mapping[str, TableRecord], facts: _Facts) -> None:
        """What later looks compare with: meanings that came (a new label changes no value), and files that were there
        before any column that is not registered yet."""
        for name, record in tables.items():
            root = facts.relations.get(record.schema.relation_id)
            if record.state == "loading" or root is None:
                continue
            known = self._known_meanings(record)
            if came := facts.meanings_of(record).keys() - known.keys():
                known |= {key: value for key, value in facts.meanings_of(record).items() if key in came}
                with self._lock:
                    self._learned[name] = tuple(sorted(known.items()))
            now = {(a.attnum, a.type_oid, a.typmod) for a in root.attributes}
            registered = {(c.attnum, c.type_oid, c.typmod) for c in record.schema.columns}
            if root.last_attnum == record.schema.last_attnum and registered <= now:
                holders = (facts.relations.get(leaf.relation_id) for leaf in record.schema.leaves)
                self.files_seen |= {holder.relation_id: holder.filenode for holder in holders if holder is not None}

    def _known_meanings(self, record: TableRecord) -> dict[str, str]:
        """Registered ones, and those that came since."""
        known = self._meanings.setdefault((record.name, record.incarnation), {})
        known |= record.schema.meanings
        return known

    def _note_generated(self, tables: Mapping[str, TableRecord], facts: _Facts) -> None:
        """Which files were made for a generated column, which may never come with the log: they hold the values that
        the table had. A later rewrite makes others."""
        for record in tables.values():
            root = facts.relations.get(record.schema.relation_id)
            if root is None:
                continue
            newest = self._newest.get(root.relation_id, record.schema.last_attnum)
            self._newest[root.relation_id] = max((a.attnum for a in root.attributes), default=0)
            if any(a.generated == "s" and a.attnum > newest for a in root.attributes):
                holders = (facts.relations.get(leaf.relation_id) for leaf in record.schema.leaves)
                self._for_generated |= {h.relation_id: h.filenode for h in holders if h is not None}

    def _mark(self, records: Mapping[str, TableRecord], facts: _Facts) -> None:
        """Note which files the rewrites that the log has told of have made, and forget what is registered by now: by
        what followed, or what was compared. Later files are a TRUNCATE's, or hold the same values."""
        loading = any(record.state == "loading" for record in records.values())
        for record in records.values():
            if record.state == "loading" or not record.schemas:
                continue
            for leaf in record.schema.leaves:
                relation = facts.relations.get(leaf.relation_id)
                if relation is None:
                    continue
                files = relation.filenode
                if leaf.relation_id in self._told:
                    self._told.discard(leaf.relation_id)
                    if files != self._for_generated.get(leaf.relation_id):
                        self._marked[leaf.relation_id] = files
                if leaf.relfilenode in (files, self._marked.get(leaf.relation_id)):
                    self._marked.pop(leaf.relation_id, None)
        if not loading:
            self._told.clear()  # relations that are no tables of ours
        # Else: a load that ends now may have looked before the rewrite, and its record says with which files.

    def _tell_of_new_files(self, name: str, record: TableRecord, facts: _Facts) -> None:
        """The log does not say what a rewrite made of values, and most rewrites change none."""
        for leaf in record.schema.leaves:
            relation = facts.relations.get(leaf.relation_id)
            if relation is None or relation.filenode in (leaf.relfilenode, self._files.get(leaf.relation_id)):
                continue
            self._files[leaf.relation_id] = relation.filenode
            log.info(
                "%s: %s has new files, by TRUNCATE, VACUUM FULL, or a rewrite whose values the log does not carry; "
                "headwater reload PIPELINE.yaml --changed compares it",
                name,
                relation.name,
            )

    def _silence(self, name: str, record: TableRecord, standing: Standing, facts: _Facts) -> SchemaChanged | None:
        """Why changes of the table do not come, or have not come, through the log."""
        again = f"headwater load PIPELINE.yaml --table {name} --again"
        found = standing_problem(standing)
        if found is not None:
            return SchemaChanged(found.message, where=name, remedy=found.remedy)
        publication = facts.publications[standing.registered.publication]
        if publication is not None:
            for problem in publication_problems(publication):
                lossy = problem.code in ("publication_operations", "publication_via_root")
                if lossy:
                    message = f"the publication {quote_ident(publication.name)} was changed: {problem.message}"
                    return SchemaChanged(message, where=name, remedy=f"{problem.remedy}; then {again}")
        # The log would show the same names and types as before, and older rows have lost their values.
        root = facts.relations[record.schema.relation_id]
        here = {attribute.attnum: attribute.name for attribute in root.attributes}
        known = {column.name for column in record.schema.columns}
        if record.schema.excluded:
            # A column list does not grow by itself: nothing of a new column is in the log.
            for attnum, new in here.items():
                if attnum > record.schema.last_attnum:
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
        if others := other_meanings(self._known_meanings(record), facts.meanings_of(record)):
            message = f"values in its rows look different now, by ALTER TYPE: {'; '.join(others)}"
            return SchemaChanged(message, where=name, remedy=f"headwater verify PIPELINE.yaml --table {name} --repair")
        for holder in facts.holders(root):
            if holder.relation_id in self._marked and not _retyped(record, root):
                message = f"{holder.name} was written anew by ALTER TABLE: the log does not carry the values it has now"
                # Rows are compared under the columns that are registered.
                same = all(here.get(column.attnum) == column.name for column in record.schema.columns)
                grown = any(a.attnum > record.schema.last_attnum and not a.generated for a in root.attributes)
                return SchemaChanged(message, where=name, remedy=_CHANGED if same and not grown else again)
            if holder.persistence == "u":
                message = f"{holder.name} was set UNLOGGED: its changes are not in the log"
                remedy = f"ALTER TABLE {holder.name} SET LOGGED; then {again}"
                return SchemaChanged(message, where=name, remedy=remedy)
        return None

    def _unpublish(self, connection: Connection, standing: Standing, facts: _Facts) -> tuple[bool, str]:
        """Take the table out of the publication: whether that is done, and the statement for a DBA if not."""
        name, publication = standing.now, facts.publications[standing.registered.publication]
        assert name is not None
        assert publication is not None
        statement = f"ALTER PUBLICATION {quote_ident(publication.name)} DROP TABLE ONLY {name}"
        if publication.made_for != self._pipeline.name:
            return False, statement
        try:
            # One attempt: this thread also keeps the position file, and comes back in a second.
            remove_table(connection, publication.name, name, wait_seconds=0)
        except Refused:
            return False, statement
        except HeadwaterError as reason:
            if connection.closed:
                raise
            self._again = True
            log.warning("%s is not out of the publication yet, trying again: %s", name, reason.message)
            return False, statement
        log.warning("%s was taken out of the publication %s: it has no usable key", name, publication.name)
        return True, statement

    def _alarm(self, name: str, problem: _Keyless) -> None:
        if time.monotonic() - self._alarms.get(name, -_ALARM_SECONDS) >= _ALARM_SECONDS:
            self._alarms[name] = time.monotonic()
            log.error(
                "%s: the source's UPDATE and DELETE fail: %s. What to do: %s", name, problem.message, problem.cure
            )


def _retyped(record: TableRecord, root: CatalogRelation) -> bool:
    """Whether a column has another type than registered: the next Relation message shows it, and who follows it asks
    whether the table was written anew. For columns that were dropped or renamed nobody asks, and one that was added is
    not followed behind its own rewrite, but it is behind an earlier one."""
    types = {column.attnum: (column.type_oid, column.typmod) for column in record.schema.columns}
    return any(types.get(a.attnum, (a.type_oid, a.typmod)) != (a.type_oid, a.typmod) for a in root.attributes)


@dataclass(frozen=True, slots=True)
class _Keyless:
    """A table whose rows cannot be found by their key any more; `cure` gives the key back."""

    message: str
    cure: str
    writers_fail: bool

    def unpublished(self) -> _Keyless:
        said = "; it was taken out of the publication, so that the source's UPDATE and DELETE go on"
        return _Keyless(self.message + said, self.cure, self.writers_fail)

    def still_published(self, statement: str) -> _Keyless:
        said = f"; the source's own UPDATE and DELETE fail until this is run there: {statement}"
        return _Keyless(self.message + said, f"a DBA runs: {statement}; then {self.cure}", self.writers_fail)

    def error(self, name: str) -> SchemaChanged:
        remedy = f"{self.cure}; then headwater load PIPELINE.yaml --table {name} --again"
        return SchemaChanged(self.message, where=name, remedy=remedy)


def _key_problem(record: TableRecord, standing: Standing, facts: _Facts) -> _Keyless | None:
    """Whether the key still finds the rows, and the source's writers go on; a table that is not published is left."""
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
            return _Keyless(f"{holder.name}: {reason}", "give it back the replica identity that it had", True)
        if why_writers_would_fail(holder, facts.version, publication.publishes_generated) is not None:
            message = f"the key of {holder.name} was dropped at the source, or its replica identity does not name one"
            return _Keyless(message, _cure(holder if holder.indexes else root, key), True)
    if len(key) < len(schema.key):
        return _Keyless(f"a column of its key ({', '.join(schema.key)}) was dropped", _cure(root, ()), False)
    _, problems = choose_key(root, holders, key, insert_only=False)
    if not problems:
        return None
    carried = all(set(key) <= carried_columns(holder) for holder in holders)
    what = "nothing guarantees its key any more" if carried else "its replica identity does not carry the key any more"
    return _Keyless(f"{what}: {problems[0].message}", problems[0].remedy, False)


def _cure(relation: CatalogRelation, key: tuple[str, ...]) -> str:
    columns = ", ".join(map(quote_ident, key))
    return identity_remedy(relation, key).replace("(...)", f"({columns})" if columns else "(...)")
