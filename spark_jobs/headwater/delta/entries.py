"""The newest entries of tables' logs as this process has put or met them, and whether they are still the same.

A program that commits by renaming (Delta's own local log store) takes the place of an entry that was put at the same
moment, and nobody gets an error. So every entry of ours is known by its token (`headwater.delta.storage.token`), and is
looked at again before anything is put on top of it, before a ledger row names it, and now and then while its table
rests. Another token is a reason to read what the commit is called, and not more: a copied folder has other ones, and so
have files of some network file systems after a while.

After a restart nothing of this is known. What can be known then is in the entries themselves: each commit of ours names
the one that it stands on (`headwater.delta.tables.replaced_below`).

By the folder of a table; of one process, whatever its drivers are. Forgotten when a driver reads its tables anew.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Final

from headwater.delta import storage
from headwater.delta.log_entries import log_entry, read_lines
from headwater.lake_root import is_remote

_RECENT: Final = 3
"""Whoever has looked before an entry was put may rename long after: some are watched besides the newest."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry as it was put or met. `txn_id`: what its commit is called; empty: not known."""

    version: int
    token: str
    txn_id: str = ""


class EntryReplaced(Exception):
    """Another program's entry has taken the place of `version`."""

    def __init__(self, folder: str, version: int) -> None:
        super().__init__(f"version {version} of {folder} is not the commit any more that was there")
        self.folder, self.version = folder, version


_known: dict[str, tuple[Entry, ...]] = {}


def put(folder: str, version: int, token: str, txn_id: str) -> None:
    """We have put this entry."""
    before = [entry for entry in _known.get(folder, ()) if entry.version < version] if version else []
    _known[folder] = (*before, Entry(version, token, txn_id))[-_RECENT:]


def meet(folder: str, version: int) -> None:
    """This entry is going to be read and judged: nothing older is of interest any more."""
    token = storage.token(log_entry(folder, version))
    _known.pop(folder, None)
    if token is not None:
        _known[folder] = (Entry(version, token, _txn_id_in(folder, version)),)


def forget(folder: str) -> None:
    _known.pop(folder, None)


def txn_id(folder: str, version: int) -> str:
    """What the commit `version` is called; empty where it has no name, or was neither put nor met."""
    return next((entry.txn_id for entry in _known.get(folder, ()) if entry.version == version), "")


def refuse_replaced(folder: str) -> int | None:
    """EntryReplaced if one is another than was put or met. The newest that is what it was; None: it is gone, cleaned up
    or with its table, which its log tells who reads it. In a store, where a look is a request, only that is looked at:
    whoever put it on condition that there is none has let it be."""
    known = _known.get(folder, ())
    stands = None
    for entry in known[-1:] if is_remote(folder) else known:
        now = storage.token(log_entry(folder, entry.version))
        stands = None if now is None else entry.version
        if now is None or now == entry.token:
            continue
        if not entry.txn_id or _txn_id_in(folder, entry.version) != entry.txn_id:
            raise EntryReplaced(folder, entry.version)
        _known[folder] = tuple(replace(e, token=now) if e is entry else e for e in _known.get(folder, ()))
    return stands


def stands(folder: str, version: int) -> bool:
    """Whether the entry `version` is there, and none is another than was put or met."""
    try:
        if refuse_replaced(folder) == version:
            return True
    except EntryReplaced:
        return False
    return storage.token(log_entry(folder, version)) is not None


def _txn_id_in(folder: str, version: int) -> str:
    said = next((line for line in read_lines(folder, version) or () if line.startswith('{"commitInfo":')), "{}")
    return str(json.loads(said).get("commitInfo", {}).get("txnId") or "")
