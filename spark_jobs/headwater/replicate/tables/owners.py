"""Which table the changes of a relation belong to that the driver has not met: a partition that was created or
attached, a table that was made again, or none of ours.
"""

from __future__ import annotations

import contextlib
import logging
import shlex
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Final

from headwater.columns.changes import has_columns, refuse_difference
from headwater.errors import SchemaChanged, SourceUnreachable
from headwater.lake.registry import TableRecord, now_text
from headwater.log.blocks import Block, Ddl, Relation, Transactions
from headwater.names import TableName
from headwater.replicate.batches.batch import Share
from headwater.replicate.preapply.process import StagingTarget
from headwater.replicate.tables.planning import transactions_that_count
from headwater.replicate.tables.states import TableStates
from headwater.schema import Leaf, TableSchema
from headwater.source.catalog.partitions import attached_leaves, attached_names, new_leaf, was_partition
from headwater.source.connection import Connection, Session
from headwater.source.snapshots import all_visible, require_visible

log = logging.getLogger(__name__)

_Found = tuple[int, Leaf, bool]
"""As `new_leaf` gives it."""
_UNASKED: Final = (-1, None, False)


class Owners:
    def __init__(self, states: TableStates, session: Session) -> None:
        self._states, self._relations, self._session = states, states.relations, session
        self._answers: dict[int, tuple[Relation, _Found | None]] = {}  # by the source, of unknown ones; lanes clear it
        self._told_of: set[int] = set()
        self._empty: dict[int, tuple[TableRecord, Leaf, int]] = {}  # by relation, until it is adopted: see `meet_empty`
        self._brought: dict[str, Sequence[Leaf]] = {}  # by table, until it is met

    def adopt(self, record: TableRecord) -> None:
        """The changes of the table's relations belong to it from now on."""
        self._relations.adopt(record)
        self._answers.clear()

    def ask_again(self, ddl: Ddl) -> None:
        """What is none of ours may have become a part of a table of ours: the log describes it once more then, also
        where a table that it is a part of was attached. Of others nothing is asked: there may be thousands."""
        if ddl.is_told:
            self._answers.clear()
        for relation_id in ddl.described:
            self._answers.pop(relation_id, None)

    def of(self, relation_ids: Iterable[int]) -> set[str]:
        """The tables that changes of these relations may belong to. From any thread."""
        return self._relations.owners(relation_ids)

    def stageable(self, relation: Relation) -> StagingTarget | None:
        """The table that changes of an open transaction may be staged for. From any thread."""
        name = self._relations.owner(relation.relation_id)
        record = self._states.records[name] if name is not None else None
        if record is None or record.state != "active" or record.schema.soft_delete or record.schema.history:
            return None
        try:
            refuse_difference(record, relation)
        except SchemaChanged:
            return None
        return StagingTarget(record.name, self._states.folder(record), record.schema)

    def owner(self, relation_id: int) -> str | None:
        """The table of a relation that is known."""
        return self._relations.owner(relation_id)

    def table_for(self, block: Block, transactions: Callable[[], Transactions]) -> str | None:
        """The table that the changes of `block`, in these transactions, belong to; the source is asked once about a
        relation that is unknown, until `ask_again`. Transient when it cannot say yet."""
        relation = block.relation
        name = self._relations.owner(relation.relation_id)
        if name is not None:
            return name
        if self._answer(relation) is None:
            return None
        for again, former in self._relations.named_as(relation):
            if not self._states.is_followed(again) or self._is_attached(again, former, transactions()):
                continue
            if not self._counts(again, block, transactions()):
                return None  # of the relation that had the name before the table's load
            self._states.suspend(again, _replaced(self._states.records[again], former))
        # Whoever has lost the name: it may be a partition of another table.
        return self._partition_of(block, transactions())

    def _counts(self, name: str, block: Block, transactions: Transactions) -> bool:
        """Whether the table lacks any of these changes, if they are its own."""
        version = self._states.versions.get(name)  # none yet: its lane has still to meet what a load has committed
        applied_lsn = version.applied_lsn if version is not None else 0
        counts = transactions_that_count(self._states.records[name], transactions, applied_lsn)
        return bool(counts[transactions.index_of(block.sequence)].any())

    def _is_attached(self, name: str, leaf: Leaf, transactions: Transactions | None = None) -> bool:
        """Whether the known `leaf`, whose name another relation has (in these transactions), still is a partition of
        the table: then it was renamed, which the record follows."""
        root, where = self._states.records[name].schema, f"{leaf.schema}.{leaf.name}"
        if not root.partitioned:
            return False

        def names_now(connection: Connection) -> dict[int, TableName]:
            if transactions is not None:
                require_visible(connection, transactions.xid.tolist(), where)
            return attached_names(connection, root.relation_id, [leaf.relation_id])

        now: dict[int, TableName] = self._session.ask(names_now)
        self.meet_names(name, now)
        return leaf.relation_id in now

    def meet_names(self, name: str, now: Mapping[int, TableName]) -> None:
        """Partitions of the table have these names by now, by relation id."""
        if (record := self._states.records.get(name)) is None:
            return  # the registry has more than this driver has met
        known = {leaf.relation_id: leaf for leaf in record.schema.leaves if leaf.relation_id in now}
        renamed = {i: leaf for i, leaf in known.items() if now[i] != TableName(leaf.schema, leaf.name)}
        if renamed:
            for leaf in renamed.values():
                self._relations.renamed(leaf)
            self._states.change(name, lambda record: _with_names(record, {i: now[i] for i in renamed}))
            for i, leaf in renamed.items():
                log.info("%s: partition %s.%s was renamed to %s", name, leaf.schema, leaf.name, now[i])

    def _answer(self, relation: Relation) -> _Found | tuple[int, None, bool] | None:
        asked_as, found = self._answers.get(relation.relation_id, (None, None))
        return found if asked_as == relation else _UNASKED

    def _partition_of(self, block: Block, transactions: Transactions) -> str | None:
        """The table of which the unknown relation of `block` is a partition."""
        relation = block.relation
        found = self._answer(relation)
        if found is _UNASKED:
            found, is_sure = self._session.ask(partial(_leaf_of, relation=relation, transactions=transactions))
            if is_sure:
                self._answers[relation.relation_id] = relation, found
                if found is None:
                    self._tell_of_gone(relation)
        root, leaf, created = found or (0, None, True)
        name = self._relations.owner(root)
        if name is not None and leaf is not None and not created:
            created = self._was_empty_before(name, leaf, block, transactions)
        if name is None or leaf is None or not (created or self._awaits(name, leaf)):
            self._relations.disown(relation.relation_id)
            return None
        if not created:
            return name
        if self._states.records[name].state == "loading":
            self._relations.own(relation.relation_id, name)  # the record is the load's: it is entered behind it
        else:
            self._adopt(name, [leaf])
        return name

    def _tell_of_gone(self, relation: Relation) -> None:
        """A partition that was created, written to, and detached or dropped, all before the log was read: nothing says
        any more whose it was. Its rows are no longer the table's, but cuts from in between lack them."""
        like = [
            record.name
            for record in list(self._states.records.values())
            if record.is_followed and record.schemas and _is_like(record.schema, relation)
        ]
        if not like or relation.relation_id in self._told_of:
            return
        self._told_of.add(relation.relation_id)
        was_one: bool = self._session.ask(partial(was_partition, relation_id=relation.relation_id))
        where = TableName(relation.schema, relation.name)
        for name in like if was_one else ():
            message = (
                f"if {where} was a partition of it until it was detached or dropped: its rows of that time are "
                "missing in cuts and in the history"
            )
            log.warning("%s: %s", name, message)
            if self._states.records[name].state == "active":  # else it has a reason of its own
                self._states.remark(name, message)

    def _awaits(self, name: str, leaf: Leaf) -> bool:
        """`leaf` was attached: suspend the table. Whether the rest of it is followed until its attached partitions are
        reloaded, all that it has by now."""
        record = self._states.records[name]
        if not record.is_followed:
            return False
        root, attached = record.schema.relation_id, leaf.relation_id
        known = [*(other.relation_id for other in record.schema.leaves), *(self._empty.keys() - {attached})]
        came = self._session.ask(partial(attached_leaves, root=root, known=known, brought=attached))
        if leaf.relation_id not in [other.relation_id for other in came]:
            self._states.suspend(name, _attached(name, [leaf]))
            return False
        self._suspend_for(name, came)
        return self._states.is_followed(name)

    def meet_attached(self, found: Mapping[str, Sequence[Leaf]]) -> bool:
        """The catalog shows these partitions by table, which brought rows: a change of them may never come. Whether a
        table was suspended for one that it does not know. SourceUnreachable, and the rest is kept
        for the next call."""
        self._brought |= found
        for leaf in [leaf for leaves in found.values() for leaf in leaves]:
            self._empty.pop(leaf.relation_id, None)  # it has been filled since, and attached once more
        is_news = False
        for name, leaves in list(self._brought.items()):
            try:
                if came := self._unknown(name, leaves):
                    is_news |= self._suspend_for(name, came)
            except SourceUnreachable:
                if not is_news:
                    raise
                break  # what became of the tables before this one is to be said
            del self._brought[name]
        return is_news

    def _unknown(self, name: str, leaves: Sequence[Leaf]) -> list[Leaf]:
        """Those that the table does not have; none where the registry has a table that this driver has not met."""
        if (record := self._states.records.get(name)) is None:
            return []
        known = {leaf.relation_id for leaf in record.schema.leaves}
        return [leaf for leaf in leaves if leaf.relation_id not in known]

    def meet_moved(self, relation_id: int, former: str, to: str) -> bool:
        """The relation, which was the table `former` or a partition of it, is a partition of the table `to` now.
        Whether that was news.

        Whatever has been applied of it since went to the wrong table, and its rows of before are still there: so that
        one is suspended. It no longer has the relation, which the catalog watch then judges as any that was attached:
        not before, since the changes that come behind its look must come to `to`. A table that is being loaded may
        already have read it, without the changes that `former` got: it takes it over when it is in step.
        """
        had, record = self._states.records.get(former), self._states.records.get(to)
        if had is None or record is None or had.state == "loading":
            return False  # one that the registry has, and this driver has not met, is met soon
        is_news = self._states.suspend(former, _moved(had, relation_id, to))
        if record.state in ("loading", "catching up"):
            return is_news
        if any(leaf.relation_id == relation_id for leaf in had.schema.leaves):
            is_news = True
            self._states.change(former, lambda now: _without_leaf(now, relation_id))
            self._relations.leave(relation_id)
            self._answers.pop(relation_id, None)  # from before it was a partition of ours
            self._relations.adopt(record)
            read = [leaf for leaf in record.schema.leaves if leaf.relation_id == relation_id]
            # A table that has left the pipeline file got no changes that this one lacks.
            if read and had.state != "removed" and relation_id not in record.unread and record.is_followed:
                self._suspend_for(to, read)
        return is_news

    def saw_empty(self, seen: Iterable[tuple[TableRecord, Leaf, int]]) -> None:
        """Partitions that were attached, and seen empty behind an LSN; each with its table as it was then."""
        self._empty |= {leaf.relation_id: (record, leaf, lsn) for record, leaf, lsn in seen}

    def meet_empty(self, read_lsn: int) -> None:
        """Of the partitions that were seen empty, those behind an LSN up to which the log has been met, `read_lsn`.

        Up to that LSN the log may still bring what was done to one before it was the table's. So it becomes the table's
        when all of that has been met, and no restart forgets it from then on: its first row may come in a month.
        SourceUnreachable, and they are kept for the next call.
        """
        ripe = [one for one in self._empty.values() if one[2] <= read_lsn]
        came: dict[str, list[Leaf]] = {}
        for record, leaf, _ in ripe:
            # One that took the place of another one under its name: its first change tells what becomes of that.
            if self._is_same_load(record) and all(self._is_attached(*one) for one in self._relations.named_as(leaf)):
                came.setdefault(record.name, []).append(leaf)
        for name, leaves in came.items():
            if unknown := self._unknown(name, leaves):
                self._adopt(name, unknown)
        for _, leaf, _ in ripe:
            del self._empty[leaf.relation_id]

    def _was_empty_before(self, name: str, leaf: Leaf, block: Block, transactions: Transactions) -> bool:
        """Whether `leaf`, which was attached, brought no row: it was empty before any of these changes, and nobody has
        attached it once more since."""
        record, seen, lsn = self._empty.get(leaf.relation_id, (None, leaf, 0))
        if record is None or record.name != name or seen.link != leaf.link or not self._is_same_load(record):
            return False
        return bool((transactions.end_lsn[transactions.index_of(block.sequence)] > lsn).all())

    def _is_same_load(self, record: TableRecord) -> bool:
        now = self._states.records.get(record.name)
        return now is not None and now.incarnation == record.incarnation

    def _suspend_for(self, name: str, came: Sequence[Leaf]) -> bool:
        """Until these partitions are reloaded, which were attached. Of some tables no part can be."""
        for owner, former in [one for leaf in came for one in self._relations.named_as(leaf)]:
            if owner == name and not self._is_attached(name, former):
                # Its rows would stay behind a reload of the one that came.
                return self._states.suspend(name, _replaced(self._states.records[name], former))
        record = self._states.records[name]
        if record.schema.soft_delete or record.schema.history:
            return self._states.suspend(name, _attached(name, came))
        leaves = [*(known for known in record.schema.leaves if known.relation_id in record.unread), *came]
        then = awaiting(record, leaves)
        error = SchemaChanged(then.reason, where=name, remedy=then.remedy)
        return self._states.suspend(name, error, lambda now: awaiting(now, leaves) if now.is_followed else None)

    def _adopt(self, name: str, leaves: Sequence[Leaf]) -> None:
        """In one commit: a year's partitions may have been attached at once."""
        self._states.change(name, lambda record: _with_leaves(record, leaves))
        for leaf in leaves:
            log.info("%s: new partition %s.%s", name, leaf.schema, leaf.name)

    def meet_leaves(self, name: str, leaves: Iterable[Leaf]) -> None:
        """These partitions belong to the table from now on, whatever brought them."""
        known = {leaf.relation_id for leaf in self._states.records[name].schema.leaves}
        if came := [leaf for leaf in leaves if leaf.relation_id not in known]:
            self._adopt(name, came)

    def meet_leaves_of(self, name: str, share: Share, transactions: Transactions) -> None:
        """In its lane: partitions that came while the table was loaded."""
        known = {leaf.relation_id for leaf in self._states.records[name].schema.leaves}
        unknown = {block.relation for block in share.blocks if block.relation.relation_id not in known}
        with self._session.apart() if unknown else contextlib.nullcontext() as connection:
            for relation in unknown:
                assert connection is not None
                found, _ = _leaf_of(connection, relation, transactions)
                if found is None:
                    continue
                _, leaf, created = found
                if not created:
                    raise _attached(name, [leaf])
                self._adopt(name, [leaf])


def _is_like(schema: TableSchema, relation: Relation) -> bool:
    return schema.partitioned and has_columns(schema, relation)


def _leaf_of(connection: Connection, relation: Relation, transactions: Transactions) -> tuple[_Found | None, bool]:
    """What the catalog says of the relation, of which these transactions have changes, and whether that is the last
    word: one that is published by itself, and that they may have attached, is asked for again while the catalog does
    not show what they did. Any other one is waited for, and Transient if it does not."""
    is_visible = all_visible(connection, transactions.xid.tolist())  # before the question
    found = new_leaf(connection, relation.relation_id)
    if found is not None or is_visible:
        return found, True
    if not was_partition(connection, relation.relation_id):
        return None, False
    require_visible(connection, transactions.xid.tolist(), f"{relation.schema}.{relation.name}")
    return new_leaf(connection, relation.relation_id), True


def awaiting(record: TableRecord, leaves: Sequence[Leaf]) -> TableRecord:
    """The table suspended until its attached partitions `leaves` are reloaded, and followed meanwhile."""
    known = {leaf.relation_id for leaf in record.schema.leaves}
    record = _with_leaves(record, [leaf for leaf in leaves if leaf.relation_id not in known])
    named = " ".join(f"--partition {shlex.quote(str(TableName(leaf.schema, leaf.name)))}" for leaf in leaves)
    remedy = f"headwater reload PIPELINE.yaml --table {shlex.quote(record.name)} {named}"
    since = record.since if record.unread else now_text()
    reason = f"{_attached_message(leaves)}; the other partitions are followed"
    suspended = record.entered("suspended", reason, remedy)
    return replace(suspended, since=since, unread=tuple(leaf.relation_id for leaf in leaves))


def _replaced(record: TableRecord, former: Leaf) -> SchemaChanged:
    """Another relation has the name of `former`, which is the table itself, or was a partition of it."""
    remedy = f"headwater load PIPELINE.yaml --table {record.name} --again"
    message = "the table was dropped and created again at the source"
    if record.schema.partitioned:
        message = (
            f"the partition {TableName(former.schema, former.name)} was replaced by another one of that name: the lake "
            "still holds the rows of the former one"
        )
    return SchemaChanged(message, where=record.name, remedy=remedy)


def _moved(record: TableRecord, relation_id: int, to: str) -> SchemaChanged:
    names = {leaf.relation_id: TableName(leaf.schema, leaf.name) for leaf in record.schema.leaves}
    if record.schema.partitioned and relation_id in names:
        message = f"the partition {names[relation_id]} was moved to {to}: the lake still holds its rows here, too"
        return SchemaChanged(
            message, where=record.name, remedy=f"headwater load PIPELINE.yaml --table {record.name} --again"
        )
    remedy = (
        f"take {record.name} out of the pipeline file (of a pattern: exclude it), then headwater load PIPELINE.yaml"
    )
    return SchemaChanged(f"it was attached to {to}, and is replicated there", where=record.name, remedy=remedy)


def _attached(name: str, leaves: Sequence[Leaf]) -> SchemaChanged:
    remedy = f"headwater load PIPELINE.yaml --table {name} --again"
    return SchemaChanged(_attached_message(leaves), where=name, remedy=remedy)


def _attached_message(leaves: Sequence[Leaf]) -> str:
    """Why a table with these partitions is not in step."""
    names = ", ".join(str(TableName(leaf.schema, leaf.name)) for leaf in leaves)
    what, whose = ("partition {} was", "it") if len(leaves) == 1 else ("partitions {} were", "they")
    return f"the {what.format(names)} attached: the log does not carry the rows {whose} brought"


def _with_names(record: TableRecord, names: Mapping[int, TableName]) -> TableRecord:
    lsn, schema = record.schemas[-1]

    def named(leaf: Leaf) -> Leaf:
        now = names.get(leaf.relation_id)
        return replace(leaf, schema=now.schema, name=now.name) if now is not None else leaf

    return replace(record, schemas=(*record.schemas[:-1], (lsn, schema.with_leaves(tuple(map(named, schema.leaves))))))


def _without_leaf(record: TableRecord, relation_id: int) -> TableRecord:
    lsn, schema = record.schemas[-1]
    left = tuple(leaf for leaf in schema.leaves if leaf.relation_id != relation_id)
    return replace(record, schemas=(*record.schemas[:-1], (lsn, schema.with_leaves(left))))


def _with_leaves(record: TableRecord, came: Sequence[Leaf]) -> TableRecord:
    lsn, schema = record.schemas[-1]
    return replace(record, schemas=(*record.schemas[:-1], (lsn, schema.with_leaves((*schema.leaves, *came)))))
