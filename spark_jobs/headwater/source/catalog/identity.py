"""Keys and replica identities: which key a table is merged by, and whether publishing lets its writers go on.

Two different questions. A published table without a usable replica identity makes the *source's own* UPDATE
and DELETE fail. And a key is usable for the lake only when the log carries it at every change (it is part of
the replica identity of every relation that holds rows) and no two rows share it at any moment (a unique,
not-null, complete index that is checked at once: a deferrable one lets two rows share a key inside a transaction).
Pure functions over what `relations` has read.
"""

from __future__ import annotations

from collections.abc import Sequence

from headwater.names import quote_ident
from headwater.source.catalog.relations import CatalogRelation, Index
from headwater.source.problems import Problem, error

GENERATED_PUBLISHED_SINCE = 180000


def identity_index(relation: CatalogRelation) -> Index | None:
    """The index whose columns an old row carries in the log (identity DEFAULT or INDEX), as the server chooses it."""
    for index in relation.indexes:
        marked = index.primary if relation.replica_identity == "d" else index.replica_identity
        if relation.replica_identity in "di" and marked and index.immediate and index.valid and not index.partial:
            return index
    return None


def carried_columns(relation: CatalogRelation) -> frozenset[str]:
    """The columns that an old row always carries in the log; empty when there is no usable identity."""
    if relation.replica_identity == "f":
        return frozenset(attribute.name for attribute in relation.attributes)
    index = identity_index(relation)
    return frozenset(index.columns) if index else frozenset()


def why_writers_would_fail(relation: CatalogRelation, version: int, publishes_generated: bool) -> str | None:
    """Why an UPDATE or DELETE at the source would fail once `relation` is published; None when it would not."""
    if not carried_columns(relation):
        return "it has no usable replica identity"
    if version < GENERATED_PUBLISHED_SINCE:
        return None
    unpublished = {a.name for a in relation.attributes if a.generated == "v"}
    if not publishes_generated:
        unpublished |= {a.name for a in relation.attributes if a.generated == "s"}
    lost = sorted(unpublished & carried_columns(relation))
    if lost:
        return f"its replica identity contains generated columns that are not published ({', '.join(lost)})"
    return None


def is_key_index(relation: CatalogRelation, index: Index) -> bool:
    """Whether `index`, its timing aside, keeps two rows from sharing its columns."""
    return index.valid and not index.partial and not index.expressions and set(index.columns) <= relation.all_not_null


def _candidates(relation: CatalogRelation) -> list[tuple[str, ...]]:
    """Keys of `relation`, the preferred first: replica identity index, primary key, then the shortest, oldest."""
    usable = [index for index in relation.indexes if is_key_index(relation, index) and index.immediate]
    usable.sort(key=lambda i: (not i.replica_identity, not i.primary, len(i.columns), i.relation_id))
    return [index.columns for index in usable]


def choose_key(
    root: CatalogRelation, holders: Sequence[CatalogRelation], declared: tuple[str, ...] | None, insert_only: bool
) -> tuple[tuple[str, ...], list[Problem]]:
    """The key that rows of `root` are found by, and what is wrong with it.

    `holders` are the relations that hold its rows: the table itself, or its leaves. An insert-only table needs
    neither a key nor an identity: its key is the declared one or empty.
    """
    if insert_only:
        return (declared or (), _uniqueness(root, declared)) if declared else ((), [])
    if declared:
        problems = _uniqueness(root, declared)
        return declared, problems or _carried(root, holders, declared)
    candidates = _candidates(root)
    for key in candidates:
        if all(set(key) <= carried_columns(holder) for holder in holders):
            return key, []
    if candidates and all(carried_columns(holder) for holder in holders):
        return candidates[0], _carried(root, holders, candidates[0])
    if candidates:
        return candidates[0], []  # the missing identity is a problem of its own, per relation
    return (), [_no_key(root)]


def _no_key(root: CatalogRelation) -> Problem:
    where = str(root.name)
    late = [index for index in root.indexes if is_key_index(root, index) and not index.immediate]
    if late:
        return _deferrable(root, late[0])
    if root.replica_identity == "f":
        message = "REPLICA IDENTITY FULL without a unique, not-null index: rows cannot be told apart"
    else:
        message = "it has no primary key or other unique, not-null, complete index to find its rows by"
    return error("no_key", where, message, f"{_add_key(root)}, or set insert_only: true if its rows never change")


def _uniqueness(root: CatalogRelation, key: tuple[str, ...]) -> list[Problem]:
    where = str(root.name)
    unknown = [name for name in key if root.attribute(name) is None]
    if unknown:
        return [error("unknown_column", where, f"key names {_names(unknown)}, which the table does not have")]
    nullable = [name for name in key if name not in root.all_not_null]
    if nullable:
        remedy = f"ALTER TABLE {where} {', '.join(f'ALTER {quote_ident(n)} SET NOT NULL' for n in nullable)}"
        return [
            error("key_nullable", where, f"the declared key holds columns that may be NULL: {_names(nullable)}", remedy)
        ]
    covering = [i for i in root.indexes if is_key_index(root, i) and set(i.columns) <= set(key)]
    if any(index.immediate for index in covering):
        return []
    if covering:
        return [_deferrable(root, covering[0])]
    message = f"no unique, complete index guarantees the declared key ({_names(key)})"
    return [error("key_not_unique", where, message, f"CREATE UNIQUE INDEX ON {where} ({_names(key)})")]


def _deferrable(root: CatalogRelation, index: Index) -> Problem:
    message = f"its key {quote_ident(index.name)} is deferrable: inside a transaction two rows may share it"
    remedy = "make the constraint NOT DEFERRABLE, or declare another key that the replica identity carries"
    return error("deferrable_key", str(root.name), message, remedy)


def _carried(root: CatalogRelation, holders: Sequence[CatalogRelation], key: tuple[str, ...]) -> list[Problem]:
    problems = []
    for holder in holders:
        missing = [name for name in key if name not in carried_columns(holder)]
        if missing and carried_columns(holder):
            message = f"the replica identity does not carry {_names(missing)} of the key ({_names(key)})"
            problems.append(error("key_not_carried", str(holder.name), message, identity_remedy(holder, key)))
    return problems


def identity_remedy(relation: CatalogRelation, key: tuple[str, ...] = ()) -> str:
    """The statement that gives `relation` a replica identity (one that carries `key`)."""
    for index in relation.indexes:
        usable = is_key_index(relation, index) and index.immediate
        if usable and (not key or set(key) <= set(index.columns)):
            identity = "DEFAULT" if index.primary else f"USING INDEX {quote_ident(index.name)}"
            return f"ALTER TABLE {relation.name} REPLICA IDENTITY {identity}"
    return _add_key(relation)


def _add_key(relation: CatalogRelation) -> str:
    return f"give it a primary key: ALTER TABLE {relation.name} ADD PRIMARY KEY (...)"


def _names(columns: Sequence[str]) -> str:
    return ", ".join(quote_ident(name) for name in columns)
