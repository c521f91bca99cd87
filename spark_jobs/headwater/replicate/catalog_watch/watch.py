"""Changes of the source's catalog that send nothing through the log, noticed while a driver runs.

A table that is dropped, renamed, set UNLOGGED or taken out of its publication falls silent; one whose key is dropped
makes the *source's own* UPDATE and DELETE fail, as long as we publish it. `poll` is called once a second: a digest of
the catalog rows that matter, in one query, and only when it has changed the whole judgement. A table without a usable
key leaves the publication here and at once; everything else that was found waits in `take` for the driver's main
thread, which suspends the tables, also where stored values have another text now (a renamed label of an enum). Changed
columns are the business of the log's Relation messages, detached partitions of nobody yet. Partitions that brought rows
wait in `attached`, those that brought none in `attached_empty`, those that another table of ours has by now in `moved`,
names that partitions have since in `renamed`.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Collection, Mapping

from headwater.errors import SchemaChanged
from headwater.lake.registry import TableRecord
from headwater.log.blocks import Ddl
from headwater.names import TableName
from headwater.pipeline_file.pipeline import Pipeline
from headwater.replicate.catalog_watch.attached import Attached, Moved
from headwater.replicate.catalog_watch.facts import CatalogFacts, read_digest, read_facts
from headwater.replicate.catalog_watch.judge import key_problem, silence
from headwater.replicate.catalog_watch.learned import Learned
from headwater.replicate.catalog_watch.rewrites import Rewrites
from headwater.replicate.catalog_watch.unpublishing import ALARM_SECONDS, Unpublishing
from headwater.schema import Leaf
from headwater.source.catalog.standing import Standing
from headwater.source.connection import Connection
from headwater.source.snapshots import VISIBLE_SECONDS, all_visible, become_visible

log = logging.getLogger(__name__)

_HINT_SECONDS = 0.5
"""So long what may have happened is waited for, where the log has told of nothing for certain."""
_TELL_SECONDS = 3600.0
"""So often new files of one relation are told of at most: some tables are truncated every minute."""


class CatalogWatch:
    """Watches the tables that `records` gives, the registry's as it is then. Looks come from any thread, one at a
    time."""

    def __init__(self, pipeline: Pipeline, records: Callable[[], Mapping[str, TableRecord]]) -> None:
        self._pipeline, self._publication, self._records = pipeline, pipeline.source.publication, records
        self._seen: tuple[str, list[TableRecord]] | None = None  # what the last judgement was made of
        self._known: set[tuple[str, int]] = set()  # found already, by incarnation: one finding a table is enough
        self._files: dict[int, int] = {}  # newest files, by relation, where these are not the registered ones
        self._told_of: dict[int, float] = {}  # when a relation's new files were told of
        self._unseen: set[int] = set()  # transactions (32 bit) that told of rewrites, until they are visible
        self._rewrites = Rewrites()
        self._learned = Learned()
        self._attached = Attached()
        self._unpublishing = Unpublishing(pipeline.name)
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
        """Look once, behind DDL that the log has told of, or may be read as telling of, in the transactions `xids` (32
        bit), over an autocommit connection. It is waited for until they are visible, `VISIBLE_SECONDS` at most; if they
        are not by then (a synchronous standby does not answer), nobody else has seen or changed the tables either, and
        a later look of `poll` judges them."""
        visible = become_visible(connection, xids, VISIBLE_SECONDS if ddl.is_told else _HINT_SECONDS)
        with self._looking:
            self._rewrites.told(ddl.rewritten)
            if ddl.is_told or not visible:
                self._unseen |= set(xids)
                self._seen = None
            self._look(connection)

    def poll(self, connection: Connection) -> None:
        """Look again and again: only the loss of `connection` is raised, anything else is logged and tried again."""
        try:
            self.look(connection)
        except Exception as reason:
            if connection.closed:
                raise
            if time.monotonic() - self._complained > ALARM_SECONDS:
                self._complained = time.monotonic()
                log.warning("the source's catalog could not be watched, trying again: %s", reason)

    def take(self) -> list[tuple[str, SchemaChanged]]:
        """What was found since the last call: tables to suspend, and why."""
        with self._lock:
            found, self._found = self._found, []
        return found

    def attached(self) -> dict[str, list[Leaf]]:
        """By table the partitions that brought rows, where some were found since the last call."""
        return self._attached.take()

    def attached_empty(self) -> list[tuple[TableRecord, Leaf, int]]:
        """The attached partitions that were seen empty since the last call: of which table, and behind which LSN."""
        return self._attached.take_empty()

    def moved(self) -> list[Moved]:
        """What the last look found to be another table's by now."""
        return self._attached.take_moved()

    def renamed(self) -> dict[str, dict[int, TableName]]:
        """By table the names of partitions that have other ones since, by relation id."""
        return self._attached.take_renamed()

    def learned(self) -> dict[str, tuple[tuple[str, str], ...]]:
        """By table all its meanings, where some came since the last call, or a virtual column did; a driver that was
        stopped compares with what the registry has of them."""
        return self._learned.take()

    @property
    def files_seen(self) -> Mapping[int, int]:
        """By relation the newest files under the columns that are registered: one mapping for good."""
        return self._learned.files_seen

    @property
    def columns_seen(self) -> Mapping[int, int]:
        """By relation the newest attnum of a virtual column that came since: one mapping for good."""
        return self._learned.columns_seen

    def _look(self, connection: Connection) -> None:
        records = dict(self._records())
        tables = {name: record for name, record in records.items() if record.schemas}
        digest = read_digest(connection, tables, self._publication)
        unchanged = (digest, self._rewrites.suspects(tables)) == self._seen
        if unchanged and not (self._again or self._unpublishing.retry_due or self._attached.is_due(tables)):
            return
        # Before the catalog is read: what is visible afterwards only may not be in it.
        visible = all_visible(connection, self._unseen)
        self._again = not visible
        facts = read_facts(connection, tables, self._publication)
        self._rewrites.note_generated(tables, facts)
        if visible:
            self._unseen.clear()
            self._rewrites.mark(records, facts)
        self._judge_all(connection, tables, facts)
        self._learned.learn(tables, facts)
        self._again |= not self._attached.look(connection, tables, facts)
        self._seen = (digest, self._rewrites.suspects(tables))

    def _judge_all(self, connection: Connection, tables: Mapping[str, TableRecord], facts: CatalogFacts) -> None:
        self._unpublishing.begin()
        for record, standing in zip(tables.values(), facts.standings, strict=True):
            self._tell_of_new_files(record, facts)
            finding = self._judge(connection, record, standing, facts)
            if finding is not None and record.state == "loading":
                self._again = True  # the load may have looked before that
            if finding is not None and record.is_followed:
                self._note(record, finding)
        self._unpublishing.end()

    def _judge(
        self, connection: Connection, record: TableRecord, standing: Standing, facts: CatalogFacts
    ) -> SchemaChanged | None:
        problem = silence(record, standing, facts, self._rewrites.marked, self._learned.meanings(record))
        # Also of a table that is suspended or was removed: as long as we publish it, its writers fail.
        entry = self._pipeline.entry_for(TableName.parse(record.name))
        keyless = key_problem(record, standing, facts, declares_key=entry is None or bool(entry.key))
        if keyless is not None and keyless.writers_fail:
            keyless = self._unpublishing.take_out(connection, record.name, keyless, standing, facts)
        return problem or (keyless.error(record.name) if keyless is not None else None)

    def _note(self, record: TableRecord, finding: SchemaChanged) -> None:
        seen = (record.name, record.incarnation)
        if seen in self._known:
            return
        self._known.add(seen)
        log.warning("%s: found in the source's catalog: %s", record.name, finding.message)
        with self._lock:
            self._found.append((record.name, finding))

    def _tell_of_new_files(self, record: TableRecord, facts: CatalogFacts) -> None:
        """The log does not say what a rewrite made of values, and most rewrites change none."""
        for leaf in record.schema.leaves:
            relation = facts.relations.get(leaf.relation_id)
            if relation is None or relation.filenode in (leaf.relfilenode, self._files.get(leaf.relation_id)):
                continue
            self._files[leaf.relation_id] = relation.filenode
            if time.monotonic() - self._told_of.get(leaf.relation_id, -_TELL_SECONDS) < _TELL_SECONDS:
                continue
            self._told_of[leaf.relation_id] = time.monotonic()
            log.info(
                "%s: %s has new files, by TRUNCATE, VACUUM FULL, or a rewrite whose values the log does not carry; "
                "headwater reload PIPELINE.yaml --changed compares it",
                record.name,
                relation.name,
            )
