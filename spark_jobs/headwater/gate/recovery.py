"""After a power cut of the lake's host: what was not on disk leaves the logs, so that the next start goes on by itself.

What the disk had not got is missing or torn (`headwater.gate.torn_logs`). What counts is what was *durable*
(`headwater.lake.durability`): of a table its versions up to the one that the ledger names at the slot's confirmed
position, since nothing above was ever told to the source. So a table is cut back to below its first version that is not
whole, if that lies above its durable one: the log brings those changes again. Not whole at or below it is damage, and
suspends that table alone. Ledger rows that name a version which is gone go, too, and with them their epochs: so it is
cut back below a version, too, whose files are lost and were replaced by a later one, since cuts name it.

Registry, kept changes and pins are on disk before anybody is told of them; only what was being written may be torn.

A disk that did not take what was written says so once (`storage.watch_disk`), and the kernel goes on to show it as if
it were there. So what lies above the durable position is read from the disk, to the ends of its files: what is not
there is treated as behind a power cut (docs/decisions/0047).

Where nothing was lost a start costs a few looks at names for each table, and reading what the ledger has above its
checkpoint, and the files and checkpoints of the last minutes.
"""

from __future__ import annotations

import contextlib
import logging
import os.path
import threading
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

import pyarrow as pa

from headwater.delta import entries, storage
from headwater.delta.log_entries import entries_of, log_entry, log_path, read_actions
from headwater.delta.whole import lost_file
from headwater.errors import DamagedLake
from headwater.gate.drivers import drivers_lock, may_live, recovery_lock, without_driver
from headwater.gate.torn_logs import (
    Loss,
    base,
    cut_back,
    drop_torn_checkpoints,
    first_loss,
    is_damaged,
    loss_in_between,
    unreadable_end,
)
from headwater.lake.cuts import HISTORY, history_name, remove_torn_pins
from headwater.lake.durability import sync_lake
from headwater.lake.ledger import Epoch, epoch_at_version, read_epoch, read_epoch_up_to
from headwater.lake.paths import (
    control_path,
    damaged_path,
    ledger_path,
    position_file_path,
    registry_path,
    table_path,
    validations_path,
)
from headwater.lake.position_file import read_position_file
from headwater.lake.registry import Registry, TableRecord
from headwater.lake_root import is_remote
from headwater.pipeline_file.pipeline import Pipeline
from headwater.source.connection import Connection, identify
from headwater.source.slot import SlotState, read_slot

log = logging.getLogger(__name__)

_LOST_SECONDS = 70.0
"""The server's own `wal_sender_timeout` is a minute."""
_LOOK_SECONDS = 0.5
_ALL = 1 << 31
_SYNCED_SECONDS = 120.0
"""A driver syncs the lake each second or so; a sync that fails, or hangs, ends it."""
_REPLICATED = ("active", "catching up", "suspended")


def mended_registry(pipeline: Pipeline, connection: Connection | None = None) -> Registry | None:
    """The registry; None: nothing was ever loaded. `connection`: for what is going to work with the tables, too.
    DamagedLake when there is no going on."""
    mend_control_tables(pipeline.lake_path())
    registry = Registry.open(pipeline.lake_path(), pipeline.name)
    if registry is not None and connection is not None:
        mend_lake(connection, pipeline, registry)
    return registry


def mend_lake(connection: Connection, pipeline: Pipeline, registry: Registry) -> dict[str, str] | None:
    """What is damaged, by the name of the table or history: why. None: that was not looked for, since a driver is
    there, or the source shows one, or there is no slot, whose position tells what was durable."""
    root = pipeline.lake_path()
    if is_remote(root):
        return {}
    if _is_read(read_slot(connection, pipeline.source.slot)):
        return None
    with without_driver(root) as no_driver:
        # A slot is free for a moment, too, while its driver connects again.
        slot = read_slot(connection, pipeline.source.slot)
        if not no_driver or _is_read(slot):
            return None
        if slot is None or slot.loss or slot.confirmed_lsn is None:
            if _is_ours(connection, pipeline, registry):
                cut_ledger_back(root)
            return None
        registry.refresh()  # a driver may have come and gone
        begin = registry.pipeline.start_lsn if registry.pipeline is not None else 0
        return mend(root, pipeline.name, list(registry.tables.values()), slot.confirmed_lsn, begin)


def _is_ours(connection: Connection, pipeline: Pipeline, registry: Registry) -> bool:
    """Whether a slot that is not there is the lake's own, and no other one at another server by a slip of the file."""
    known = registry.pipeline
    if known is None or known.slot != pipeline.source.slot:
        return False
    return known.system_id == identify(connection).system_id


def mended_lake(connection: Connection, pipeline: Pipeline, registry: Registry) -> dict[str, str] | None:
    """The same, and nothing is damaged beside a driver that works on this lake: it has mended before it said so. None:
    what a power cut has left may be there. The source shows a driver that is gone, say."""
    damaged = mend_lake(connection, pipeline, registry)
    if damaged is None:
        with without_driver(pipeline.lake_path()) as no_driver:
            return None if no_driver else {}
    return damaged


def await_lost_driver(connection: Connection, pipeline: Pipeline, stop: threading.Event) -> None:
    """For who would take over from a driver that is gone: behind a power cut the source still waits for it, up to its
    `wal_sender_timeout`, and what it left has to be mended first. One that works on this lake is not waited for."""
    root = pipeline.lake_path()
    if is_remote(root):
        return
    deadline = time.monotonic() + _LOST_SECONDS
    while time.monotonic() < deadline and not stop.is_set():
        slot = read_slot(connection, pipeline.source.slot)
        if slot is None or not slot.active:
            return
        if may_live(root, slot):
            return
        stop.wait(_LOOK_SECONDS)
    if not stop.is_set():
        log.warning(
            "a driver reads the source and does not hold %s (an older version, or another machine?): what a power cut "
            "has left is mended when it has let go of the slot",
            drivers_lock(root),
        )


def _is_read(slot: SlotState | None) -> bool:
    return slot is not None and slot.active


def mend_control_tables(root: str) -> None:
    """What was being written to registry, ledger and validations when the power went was never told to anybody, and
    goes. Any job may call it, beside any other. Refused when the registry is damaged."""
    storage.watch_disk(root)
    if is_remote(root) or not storage.is_folder(control_path(root)):
        return  # a store loses nothing that it has taken
    for folder in (registry_path(root), ledger_path(root), validations_path(root)):
        if damaged := drop_torn_checkpoints(folder):
            if folder != validations_path(root):
                raise DamagedLake(f"{damaged} is not whole, and the entries that it stands for are gone")
            with storage.exclusive(recovery_lock(root)):
                if drop_torn_checkpoints(folder):  # another job may have done it, and somebody validated since
                    set_aside(root, folder)  # nothing stands on what was validated
        if _control_loss(folder) is None:
            continue
        with storage.exclusive(recovery_lock(root)):
            loss = _control_loss(folder)
            # Nothing stands on what was validated: it is validated again.
            if loss is not None and (loss.newest or folder == validations_path(root)):
                cut_back(folder, loss.version)
            elif loss is not None and folder != ledger_path(root):  # what goes of that one the slot decides: `mend`
                raise DamagedLake(f"{loss.what}: what was written behind it is in doubt")


def _last_written(folder: str) -> float:
    """When the newest entry was: by the lake's own clock, as of other files."""
    newest = entries_of(storage.names(log_path(folder)))[-1:]
    return max((storage.info(log_entry(folder, version)).modified for version in newest), default=0.0)


def _control_loss(folder: str, newest_read: int = 2) -> Loss | None:
    """Any job looks: to their ends are read only the newest two. Who wrote them may have been told that the disk did
    not take them: that ended it, and nobody else knows. OSError where the disk does not give one back."""
    above = base(folder)
    newest = [version for version in entries_of(storage.names(log_path(folder)))[-newest_read:] if version > above]
    storage.forget(*(log_entry(folder, version) for version in newest))
    return first_loss(folder, above) or unreadable_end(folder, newest)


def mend(
    root: str, pipeline: str, tables: Iterable[TableRecord], confirmed_lsn: int, start_lsn: int = 0
) -> dict[str, str]:
    """Take what a power cut has left half done out of the lake under `root`, while no driver and nobody else does.

    `confirmed_lsn`: the slot's position; `start_lsn`: where the log begins for the lake. Returns what is damaged, and
    cannot be had again from the log: why, by the name of the table or history. DamagedLake when it is the ledger.
    """
    sync_lake(root)  # what was written and not synced is whole; all that is read below is then on disk
    _mend_ledger(root, confirmed_lsn, start_lsn)
    epoch = read_epoch_up_to(root, confirmed_lsn)
    since = _last_written(ledger_path(root)) - _SYNCED_SECONDS
    subjects = [subject for subject in _subjects(root, pipeline, tables) if subject.can_be_read(since)]
    durable = {subject.name: subject.durable(epoch) for subject in subjects}
    damaged: dict[str, str] = {}
    for subject in subjects:
        why = _mend_table(subject.name, subject.folder, durable[subject.name])
        if why:
            damaged[subject.name] = why
    newest = read_epoch(root)
    if newest is not None and newest.position.lsn > confirmed_lsn:
        _drop_void_rows(root, confirmed_lsn, [subject for subject in subjects if subject.name not in damaged])
        newest = read_epoch(root)
    _drop_claim(root, newest)
    remove_torn_pins(root)
    return damaged


def cure(root: str, folder: str) -> None:
    """Before a load writes the table in `folder` anew: whatever its files hold, it can. What lies below the damage
    stays for who reads older cuts."""
    with contextlib.suppress(OSError):  # what the disk does not give back is damaged
        drop_torn_checkpoints(folder)
    loss = first_loss(folder, base(folder))
    if loss is not None:
        cut_back(folder, loss.version)
    if is_damaged(folder) or (loss is not None and loss.version == 0):
        set_aside(root, folder)


def begin_anew(root: str, tables: Iterable[str]) -> bool:
    """Set aside what the lake knows of itself, with the logs of the tables in these folders: their commits carry
    generations and positions that nothing tells the meaning of any more. False, and nothing done, while a driver lives.
    Of two jobs that found the damage together one does it, and the other finds what that one has begun."""
    control = validations_path(root), ledger_path(root), registry_path(root)
    with without_driver(root) as no_driver:
        if no_driver and not all(_is_whole(folder) for folder in control):
            for folder in (*tables, *control):
                if storage.is_folder(log_path(folder)):
                    set_aside(root, folder)
            storage.delete(position_file_path(root))
    return no_driver


def _is_whole(folder: str) -> bool:
    if not storage.is_folder(log_path(folder)):
        return True
    try:
        return not is_damaged(folder) and _control_loss(folder, _ALL) is None and not lost_file(folder)
    except (OSError, ValueError, pa.ArrowException):
        return False


def set_aside(root: str, folder: str) -> None:
    """The table's folder goes elsewhere, for whoever wants to look into it, and the table begins anew."""
    place = damaged_path(root, os.path.relpath(folder, root))
    storage.delete_folder(place)
    storage.make_folder(os.path.dirname(place))
    storage.move_folder(folder, place)
    entries.forget(folder)
    log.warning("%s is damaged and set aside: remove %s when nobody needs it any more", folder, place)


def _mend_table(name: str, folder: str, durable: int) -> str:
    """Cut the table back, if need be; why it is damaged, or nothing."""
    if not storage.is_folder(log_path(folder)):
        return ""  # the whole table is gone: its driver says so
    if durable < 0:
        return f"the commit of its load is not in {log_path(folder)}"
    if read_actions(folder, durable) is None and base(folder) < durable:
        return f"{log_entry(folder, durable)} is missing, empty or cut short"
    while (loss := first_loss(folder, durable, read=True) or loss_in_between(folder, durable)) is not None:
        cut_back(folder, loss.version)
        log.warning("%s goes on at version %d: %s", name, loss.version - 1, loss.what)
    return ""


# The lake


@dataclass(frozen=True, slots=True)
class _Subject:
    """A table or history that a driver goes on with, by its name in ledger rows. `since`: the position of its load,
    whose commit carries `app_id`."""

    name: str
    folder: str
    since: int
    app_id: str

    def can_be_read(self, since: float) -> bool:
        """Without checkpoints that are torn. One that cannot be read is its own trouble, and is found in its lane."""
        try:
            drop_torn_checkpoints(self.folder, since)
            storage.names(log_path(self.folder))
        except OSError as error:
            log.warning("%s: it cannot be looked at: %s", self.name, error)
            return False
        return True

    def version_in(self, epoch: Epoch | None) -> int | None:
        """In `epoch`; None where that may be one of before its load, which may have begun the table anew."""
        known = epoch.tables.get(self.name) if epoch is not None else None
        if epoch is None or known is None or epoch.position.lsn < self.since:
            return None
        return known.version if known.state in ("active", "suspended") else None

    def durable(self, epoch: Epoch | None) -> int:
        """The version that must be whole, at `epoch`: a load's is, before the registry says that it is there. -1: there
        is none."""
        known = self.version_in(epoch)
        if known is not None:
            return known
        above = base(self.folder)
        for version in entries_of(storage.names(log_path(self.folder))):
            if version > above:
                actions = read_actions(self.folder, version) or ()
                if any(action.get("txn", {}).get("appId") == self.app_id for action in actions):
                    return version
        return above


def _subjects(root: str, pipeline: str, tables: Iterable[TableRecord]) -> Iterator[_Subject]:
    for record in tables:
        if record.state in _REPLICATED:
            yield _Subject(record.name, table_path(root, record.path), record.start_lsn, record.app_id(pipeline))
            if record.schemas and record.schema.history:
                beside = replace(record, name=history_name(record.name), path=record.path + HISTORY)
                yield _Subject(beside.name, table_path(root, beside.path), record.start_lsn, beside.app_id(pipeline))


def cut_ledger_back(root: str) -> None:
    """Below its first row that is not whole, while no driver lives: where the slot is lost nothing tells what of it was
    durable, and all tables are compared."""
    loss = _control_loss(ledger_path(root), _ALL)
    if loss is not None:
        cut_back(ledger_path(root), loss.version)
        _drop_claim(root, read_epoch(root))


def ledger_is_whole(root: str) -> bool:
    return is_remote(root) or _control_loss(ledger_path(root), _ALL) is None


def _drop_claim(root: str, newest: Epoch | None) -> None:
    """The position file must not claim what is not there any more."""
    file = read_position_file(root)
    if file is not None and file.epoch > (newest.epoch if newest is not None else 0):
        storage.delete(position_file_path(root))


def _mend_ledger(root: str, confirmed_lsn: int, start_lsn: int) -> None:
    """From the first row on that is not whole they go, if what is left reaches what the source was told. Behind
    `mend_control_tables`, which has taken what was torn at the top."""
    loss = _control_loss(ledger_path(root), _ALL)
    if loss is None:
        return
    left = epoch_at_version(root, loss.version - 1)
    if (left.position.lsn if left is not None else start_lsn) < confirmed_lsn:
        raise DamagedLake(f"{loss.what}: what was written behind it is in doubt")
    cut_back(ledger_path(root), loss.version)


def _drop_void_rows(root: str, confirmed_lsn: int, subjects: Iterable[_Subject]) -> None:
    """Rows above the slot's position that name a version which is not there go, and all above them."""
    tops = [(one, max(entries_of(storage.names(log_path(one.folder))), default=-1)) for one in subjects]

    def is_void(epoch: Epoch) -> bool:
        return any((version := one.version_in(epoch)) is not None and version > top for one, top in tops)

    void: int | None = None
    for version, epoch in _rows_above(root, confirmed_lsn):
        if not is_void(epoch):
            break  # versions only rise
        void = version
    if void is not None:
        cut_back(ledger_path(root), void)


def _rows_above(root: str, lsn: int) -> Iterator[tuple[int, Epoch]]:
    """Newest first, the epochs above `lsn` with all their tables, and the ledger versions that brought them."""
    folder = ledger_path(root)
    for version in reversed(entries_of(storage.names(log_path(folder)))):
        if not any(action.get("add", {}).get("dataChange") for action in read_actions(folder, version) or ()):
            continue  # rows were only gathered
        epoch = epoch_at_version(root, version)
        if epoch is None or epoch.position.lsn <= lsn:
            return
        yield version, epoch
