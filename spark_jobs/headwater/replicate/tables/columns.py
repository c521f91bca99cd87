"""A table follows the columns of its source, in its lane, between two of its commits: a barrier for this table only.

A share may bring changes from before and after a change of columns, in one transaction even. The lake's table becomes
what the newest of them shows, and older ones are then read as that: under the names of now, without columns that are
gone, with the value of older rows in columns that came later. So a share stays one commit.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import pairwise

import pyarrow as pa

from headwater.apply.applier import damage_named
from headwater.apply.by_spark.tasks import FileTasks
from headwater.apply.columns import ColumnChange, evolve, require_possible, schemas_counted
from headwater.apply.direct import Fence
from headwater.columns.changes import (
    between,
    changed,
    described,
    differences,
    evolved,
    has_columns,
    recast,
    refuse_lost_key,
    refuse_other_table,
)
from headwater.columns.log_format import refuse_late_text
from headwater.columns.selection import as_registered, registered_columns
from headwater.columns.widened import Found, refuse_other_values
from headwater.delta.delta_log import read_snapshot
from headwater.errors import BadValue
from headwater.failpoints import reach
from headwater.lake.registry import TableRecord
from headwater.log.blocks import Block, Relation, RelationColumn, Rows, Transactions, Truncate
from headwater.log.values.decode import older_value
from headwater.names import TableName, yaml_key
from headwater.pipeline_file.pipeline import Pipeline
from headwater.replicate.batches.batch import Share
from headwater.replicate.tables.foreign_writes import ForeignWrites
from headwater.replicate.tables.histories import Histories
from headwater.replicate.tables.planning import transactions_that_count
from headwater.replicate.tables.reshaping import Reshaping
from headwater.replicate.tables.states import TableStates
from headwater.schema import TableSchema
from headwater.source.catalog.catalog import read_catalog
from headwater.source.catalog.column_facts import ColumnFacts, read_column_facts
from headwater.source.catalog.partitions import attached_names
from headwater.source.catalog.relations import one_snapshot
from headwater.source.connection import connect
from headwater.source.snapshots import require_visible

log = logging.getLogger(__name__)


class Evolving:
    """From any lane; each table in its own."""

    def __init__(
        self,
        pipeline: Pipeline,
        states: TableStates,
        foreign: ForeignWrites,
        histories: Histories,
        reshaping: Reshaping,
        fence: Fence,
        tasks: FileTasks,
        files_seen: Mapping[int, int],
        columns_seen: Mapping[int, int],
        *,
        binary: bool,
    ) -> None:
        """`files_seen`: by relation the newest files that the catalog showed under the columns that are registered;
        `columns_seen`: the newest attnum of a virtual column that it showed beside these.
        `binary`: whether the log connection sends values in their binary form."""
        self._pipeline, self._states, self._foreign, self._histories = pipeline, states, foreign, histories
        self._reshaping, self._fence, self._files_seen, self._binary = reshaping, fence, files_seen, binary
        self._tasks, self._columns_seen = tasks, columns_seen
        self._finished: dict[str, tuple[int, int, int]] = {}  # by table what of it was seen to be finished

    def as_now(self, name: str, share: Share, transactions: Transactions, still_alive: Callable[[], None]) -> Share:
        """`share` with every change that counts in the table's newest columns, which the lake's table then has as well.

        SchemaChanged for what it cannot follow; the table is as it was.
        """
        record = self._states.records[name]
        # Behind a load the log may bring older changes, from before the very trouble that the load has cured.
        relations = self._relations_that_count(name, share, transactions)
        for relation in relations:
            refuse_other_table(record, relation, partial(self._is_partition, record, transactions))
        self.finish(name, still_alive)
        if not all(has_columns(record.schema, relation) for relation in relations):
            self._follow(name, share, transactions, still_alive)
            share = replace(share, blocks=[_renamed(self._states.records[name], block) for block in share.blocks])
            relations = self._relations_that_count(name, share, transactions)
        # Also of those from before a change of columns: the identity may have been another one, and is right again.
        for relation in relations:
            refuse_lost_key(self._states.records[name], relation)
        return share

    def _is_partition(self, record: TableRecord, transactions: Transactions, relation: Relation) -> bool:
        """Of the table: when it had this name, or for the catalog, whatever its name is there."""
        if self._states.relations.was_named(relation):
            return True
        with contextlib.closing(connect(self._pipeline.conninfo(), application_name="headwater columns")) as connection:
            require_visible(connection, transactions.xid.tolist(), record.name)
            of_now = attached_names(connection, record.schema.relation_id, [relation.relation_id])
            return relation.relation_id in of_now

    def _relations_that_count(self, name: str, share: Share, transactions: Transactions) -> set[Relation]:
        """Those with changes that count. Where all transactions do, no change is looked at: they may be on disk."""
        blocks, _ = share.that_count(transactions, self._counts(name, transactions))
        return {block.relation for block, mask in blocks if mask.any()}

    def _follow(self, name: str, share: Share, transactions: Transactions, still_alive: Callable[[], None]) -> None:
        """Whatever of the share is still to be applied, in its order."""
        shows_newest = False
        blocks, truncates = self._that_count(name, share, transactions)
        for index, (block, first_lsn, last_lsn) in enumerate(blocks):
            record = self._states.records[name]
            if has_columns(record.schema, block.relation):
                shows_newest = True
            elif shows_newest or last_lsn > record.schemas[-1][0] or not _knew(record, block.relation):
                empty = self._was_empty(record, block, [before for before, _, _ in blocks[:index]], truncates)
                self._evolve(record, block.relation, transactions, first_lsn, still_alive, empty=empty)
                shows_newest = True

    def _was_empty(
        self, record: TableRecord, block: Block, before: Sequence[Block], truncates: Sequence[Truncate]
    ) -> bool:
        """Whether the table had no row when `block`, which shows other columns, begins. `before`: what else of the
        share begins earlier."""
        first = block.sequence[0]
        leaves = {leaf.relation_id for leaf in record.schema.leaves}
        emptied = max(
            (t.sequence for t in truncates if t.sequence < first and leaves <= set(t.relation_ids)), default=-1
        )
        if any(((other.sequence > emptied) & (other.sequence < first)).any() for other in before):
            return False
        version = self._states.versions[record.name].version
        return emptied >= 0 or not read_snapshot(self._states.folder(record), version).files

    def _that_count(
        self, name: str, share: Share, transactions: Transactions
    ) -> tuple[list[tuple[Block, int, int]], list[Truncate]]:
        """Each block with changes that count, with the commits of the first and last of these; and the truncates that
        count."""
        found = []
        blocks, truncates = share.that_count(transactions, self._counts(name, transactions))
        for block, mask in blocks:
            if mask.any():
                numbers = block.sequence[mask]
                ends = transactions.end_lsn[transactions.index_of(numbers[[0, -1]])]
                found.append((int(numbers[0]), block, int(ends[0]), int(ends[1])))
        found.sort(key=lambda one: one[0])
        return [(block, first, last) for _, block, first, last in found], truncates

    def _counts(self, name: str, transactions: Transactions) -> Rows:
        """Which of the transactions the table does not hold, or its history."""
        applied_lsn = min(version.applied_lsn for version in self._states.versions.of(name).values())
        return transactions_that_count(self._states.records[name], transactions, applied_lsn)

    def _evolve(
        self,
        record: TableRecord,
        relation: Relation,
        transactions: Transactions,
        lsn: int,
        still_alive: Callable[[], None],
        *,
        empty: bool,
    ) -> None:
        """Source, registry, lake, in this order: what a driver has begun before it died, the next one ends before it
        applies anything."""
        if not relation.columns:
            name = TableName(relation.schema, relation.name)
            raise changed(record, f"the pipeline file hides columns of {name}: what the log brought of it was left out")
        if record.on_schema_change == "suspend":
            what = differences(record.schema, relation)
            raise changed(record, f"its columns changed at the source ({what}), and on_schema_change says suspend")
        now, facts = self._catalog(record, relation, transactions)
        schema = evolved(record, relation, now, facts, self._files_seen, empty=empty)
        folder, version = self._states.folder(record), self._states.versions[record.name].version
        to = _columns(record, record.schema, schema, len(record.schemas) + 1)
        with _suspending(record, folder):
            require_possible(folder, version, record.name, to)
        still_alive()

        def followed(old: TableRecord) -> TableRecord | None:
            if (old.incarnation, len(old.schemas)) != (record.incarnation, len(record.schemas)):
                return None
            # Meanwhile leaves may have come, gone to another table, or got other names: only files are news here.
            files = {leaf.relation_id: leaf.relfilenode for leaf in schema.leaves}
            leaves = [
                replace(one, relfilenode=files.get(one.relation_id, one.relfilenode)) for one in old.schema.leaves
            ]
            return replace(old, schemas=(*old.schemas, (lsn, schema.with_leaves(tuple(leaves)))))

        self._states.change(record.name, followed)
        if self._states.records[record.name].incarnation != record.incarnation:
            raise changed(record, "it is being loaded again")  # whose state it is now: nothing of the share is applied
        log.info("%s: follows its source: %s", record.name, described(record.schema, schema))
        self.finish(record.name, still_alive)
        # What follows cannot be read: the next run asks for text.
        refuse_late_text({record.name: self._states.records[record.name]}, binary=self._binary)

    def refuse_other_values(self, name: str, transactions: Transactions, found: Found) -> None:
        """SchemaChanged when a column that these transactions, which the table holds by now, made wider had other
        values made of those that it had. Also for who did not follow it himself, but died between that and here."""
        record = self._states.records[name]
        widened = {
            column.attnum
            for (_, before), (since, after) in pairwise(record.schemas)
            if transactions.end_lsn[0] <= since <= transactions.end_lsn[-1]
            for column in recast(before, after.columns)
        }
        columns = [column for column in record.schema.columns if column.attnum in widened]
        if columns:
            refuse_other_values(self._pipeline, record, columns, found)

    def finish(self, name: str, still_alive: Callable[[], None]) -> None:
        """The lake has the columns that the registry names."""
        record = self._states.records[name]
        if self._finished.get(name) == self._known(record):
            return
        self._reshaping.learn(record)
        record = self._states.records[name]
        if len(record.schemas) > 1:
            reach("replicate.before_evolution", name)
            self._take_steps(record, still_alive)
            reach("replicate.after_evolution", name)
        self._finished[name] = self._known(record)

    def _take_steps(self, record: TableRecord, still_alive: Callable[[], None]) -> None:
        """Each change of columns that the lake's table has not followed: a power cut may have taken several from there,
        and none from the registry, whose records are on disk at once."""
        name, folder, app_id = record.name, self._states.folder(record), record.app_id(self._pipeline.name)
        with _suspending(record, folder):
            self._histories.evolve(record, self._tasks, still_alive)
            done = schemas_counted(read_snapshot(folder, self._states.versions[name].version), app_id)
        steps = enumerate(pairwise(schema for _, schema in record.schemas), 2)
        for to in [_columns(record, *schemas, number) for number, schemas in steps if number > done]:
            change = partial(evolve, name=name, app_id=app_id, to=to, fence=self._fence, tasks=self._tasks)
            with _suspending(record, folder):
                self._reshaping.commit(record, change, still_alive)

    def _known(self, record: TableRecord) -> tuple[int, int, int]:
        """What holds until a load, a change of columns, or a commit of somebody else: perhaps a driver before this one,
        that has rebuilt the table."""
        return record.incarnation, len(record.schemas), self._foreign.met[record.name]

    def remember(self, meanings: Mapping[str, tuple[tuple[str, str], ...]]) -> None:
        """What is to be compared with the catalog from now on, of these tables: `files_seen`, `columns_seen`, and
        meanings, if there are new ones."""

        def how(record: TableRecord) -> TableRecord | None:
            lsn, schema = record.schemas[-1]
            seen = self._files_seen
            leaves = tuple(replace(leaf, seen=seen.get(leaf.relation_id, leaf.seen)) for leaf in schema.leaves)
            known = tuple(sorted(dict((*meanings[record.name], *schema.meanings)).items()))
            last = max(schema.last_attnum, self._columns_seen.get(schema.relation_id, 0))
            now = replace(schema, leaves=leaves, meanings=known, last_attnum=last)
            if not record.is_followed or now == schema:
                return None
            return replace(record, schemas=(*record.schemas[:-1], (lsn, now)))

        self._states.change_each([name for name in meanings if how(self._states.records[name]) is not None], how)

    def _catalog(
        self, record: TableRecord, relation: Relation, transactions: Transactions
    ) -> tuple[TableSchema, ColumnFacts]:
        name = TableName.parse(record.name)
        entry = self._pipeline.entry_for(name)
        if entry is None:
            raise changed(record, f"its columns changed at the source ({differences(record.schema, relation)})")
        alone = self._pipeline.model_copy(update={"tables": (entry.model_copy(update={"name": name}),)})
        alone = as_registered(alone, [record])
        conninfo = self._pipeline.conninfo()
        # A session of its own: several tables may follow at once.
        session = connect(conninfo, application_name="headwater columns")
        with contextlib.closing(session) as connection, ExitStack() as snapshot:
            require_visible(connection, transactions.xid.tolist(), record.name)
            snapshot.enter_context(one_snapshot(connection))
            catalog = read_catalog(connection, alone)
            found = next((registered_columns(t.schema, record) for t in catalog.tables if t.name == name), None)
            if found is None:
                reasons = "; ".join(problem.message for problem in catalog.problems if problem.is_error)
                what = differences(record.schema, relation)
                raise changed(record, f"its columns changed at the source ({what}): {reasons or 'it is not there'}")
            known = {column.attnum for column in record.schema.columns}
            added = [column for column in found.columns if column.attnum not in known]
            leaves = [leaf.relation_id for leaf in found.leaves]
            return found, read_column_facts(connection, found.relation_id, leaves, added)


def _columns(record: TableRecord, before: TableSchema, after: TableSchema, number: int) -> ColumnChange:
    """What the lake's table has to become. BadValue when a default is none of its type's values."""
    renamed, added, widened = between(before, after.columns)
    fill = {}
    for column in added:
        if column.missing:
            fill[column.name], possible = older_value(column)
            if not possible:
                what = f"column {column.name} was added with a default"
                raise BadValue(
                    f"{what} that the lake's type {column.value.lake} cannot hold",
                    where=record.name,
                    remedy=f'set on_bad_value: {{{yaml_key(column.name)}: "null"}} or string in the pipeline file, '
                    f"then headwater load PIPELINE.yaml --table {record.name} --again",
                )
    return ColumnChange(after, tuple(added), renamed, fill, tuple(widened), number)


@contextlib.contextmanager
def _suspending(record: TableRecord, folder: str) -> Iterator[None]:
    """What is wrong with the lake's table, in `folder`, is this table's trouble alone."""
    try:
        with damage_named(record, folder):
            yield
    except (ValueError, KeyError, pa.ArrowException) as error:
        # Not its text: it may show a row's value.
        why = f"its columns changed at the source, and the table in the lake cannot follow ({type(error).__name__})"
        raise changed(record, why) from error


def _knew(record: TableRecord, relation: Relation) -> bool:
    """Whether the table once had exactly these columns, while it was replicated."""
    return any(has_columns(schema, relation) for _, schema in record.schemas[:-1])


def _renamed(record: TableRecord, block: Block) -> Block:
    """A block from before a change of columns, with the names of now; what is gone is under no name of the table's."""
    schema = record.schema
    if has_columns(schema, block.relation):
        return block
    older = next((schema for _, schema in reversed(record.schemas) if has_columns(schema, block.relation)), None)
    if older is None:
        return block  # nothing of it counts, and so it is not read
    now = {column.attnum: column.name for column in schema.columns}
    attnums = {column.name: column.attnum for column in older.columns}
    columns = tuple(
        RelationColumn(now.get(attnums[column.name], ""), column.type_oid, column.typmod, column.identity)
        for column in block.relation.columns
    )
    return replace(block, relation=replace(block.relation, columns=columns))
