"""After a power cut of the lake's host: what was not on disk leaves the logs, so that the next start goes on by itself.

What the disk had not got is missing, empty or cut short, in no order: an entry may be torn below a whole one, a data
file behind a whole entry. What counts is what was *durable* (`headwater.lake.durability`): of a table its versions up
to the one that the ledger names at the slot's confirmed position, since nothing above was ever told to the source. So a
table is cut back to below its first version that is not whole, if that lies above its durable one: the log brings those
changes again. Not whole at or below it is damage, and suspends that table alone. Ledger rows that name a version which
is gone go, too, and with them their epochs.

Registry, kept changes and pins are on disk before anybody is told of them; only what was being written may be torn.

Where nothing was lost a start costs a few looks at names for each table, and one at each file of the last second.
"""

from __future__ import annotations

import json
import logging
import os.path
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from headwater.errors import DamagedLake
from headwater.lake import storage
from headwater.lake.cuts import HISTORY, history_name, remove_torn_pins
from headwater.lake.deletion_vectors import vector_file
from headwater.lake.ledger import Epoch, epoch_at_version, read_epoch, read_epoch_up_to
from headwater.lake.log_entries import Action, checkpoints_of, entries_of, read_actions
from headwater.lake.log_files import by_version
from headwater.lake.paths import (
    control_path,
    damaged_path,
    ledger_path,
    log_entry,
    log_path,
    position_file_path,
    registry_path,
    table_path,
    validations_path,
)
from headwater.lake.position_file import read_position_file
from headwater.lake.registry import TableRecord

log = logging.getLogger(__name__)

_REPLICATED = ("active", "catching up", "suspended")
_POINTER = "_last_checkpoint"
_PARQUET_END = b"PAR1"
_LEAST_PARQUET = 12


@dataclass(frozen=True, slots=True)
class Loss:
    """The first version of a log that is not whole. `what`: which file, and how; `newest`: nothing whole lies above."""

    version: int
    what: str
    newest: bool


def mend_control_tables(root: str) -> None:
    """What was being written to registry, ledger and validations when the power went was never told to anybody, and
    goes. Any job may call it, beside any other. Refused when the registry, or what was validated, is damaged."""
    if not storage.is_folder(control_path(root)):
        return
    for folder in (registry_path(root), ledger_path(root), validations_path(root)):
        drop_torn_checkpoints(folder)
        if first_loss(folder, base(folder)) is None:
            continue
        with storage.exclusive(_lock(root)):
            loss = first_loss(folder, base(folder))
            if loss is not None and loss.newest:
                cut_back(folder, loss.version)
            elif loss is not None and folder != ledger_path(root):  # what goes of that one the slot decides: `mend`
                raise DamagedLake(f"{loss.what}: what was written behind it is in doubt")


def mend(root: str, tables: Iterable[TableRecord], confirmed_lsn: int | None) -> dict[str, str]:
    """Take what a power cut has left half done out of the lake under `root`, while no driver runs.

    `confirmed_lsn`: the slot's position; None: there is no slot any more. Returns what is damaged, and cannot be had
    again from the log: why, by the name of the table or history. Refused when it is the ledger.
    """
    with storage.exclusive(_lock(root)):
        _mend_ledger(root, confirmed_lsn)
        durable = read_epoch_up_to(root, confirmed_lsn) if confirmed_lsn is not None else None
        damaged: dict[str, str] = {}
        folders = dict(_folders(root, tables))
        for name, folder in folders.items():
            version = durable.tables.get(name) if durable is not None else None
            why = _mend_table(name, folder, version.version if version is not None else None)
            if why:
                damaged[name] = why
        newest = read_epoch(root)
        if confirmed_lsn is not None and newest is not None and newest.position.lsn > confirmed_lsn:
            _drop_void_rows(root, confirmed_lsn, {n: f for n, f in folders.items() if n not in damaged})
            newest = read_epoch(root)
        file = read_position_file(root)
        if file is not None and file.epoch > (newest.epoch if newest is not None else 0):
            storage.delete(position_file_path(root))  # it claims what is not there any more
        remove_torn_pins(root)
    return damaged


# One table


def first_loss(folder: str, durable: int) -> Loss | None:
    """The first version above `durable` that is not whole; None: all are."""
    if not storage.exists(log_entry(folder, durable + 1)) and durable >= 0:
        return None  # names reach the disk in the order of their making: nothing can be above
    entries = [version for version in entries_of(storage.names(log_path(folder))) if version > durable]
    whole: list[tuple[int, list[Action]]] = []
    loss: Loss | None = None
    for version in range(durable + 1, max(entries, default=durable) + 1):
        actions = read_actions(folder, version)
        if actions is None and not storage.exists(log_entry(folder, version)) and base(folder) >= version:
            whole = []  # cleaned up: a checkpoint stands for all up to there
            continue
        if actions is None:
            how = "is empty or cut short" if version in entries else "is missing"
            newest = not any(read_actions(folder, above) for above in entries if above > version)
            loss = Loss(version, f"{log_entry(folder, version)} {how}", newest)
            break
        whole.append((version, actions))
    # What is lost of files counts where they are live; below a loss others may be.
    while (lost := _lost_file(folder, whole)) is not None:
        version, what = lost
        newest = version == whole[-1][0] and (loss is None or loss.newest)
        loss = Loss(version, what, newest)
        whole = [(known, actions) for known, actions in whole if known < version]
    return loss


def cut_back(folder: str, version: int) -> None:
    """Remove `version` and what follows it, newest first: killed in between, it leaves a log without a hole."""
    for number, name in reversed(by_version(storage.names(log_path(folder)))):
        if number >= version:
            storage.delete(log_path(folder, name))
    pointed = _pointed_at(folder)
    if pointed is not None and pointed >= version:
        _drop_pointer(folder)
    log.warning("%s: version %d and what follows it had not reached the disk, and is taken away", folder, version)


def drop_torn_checkpoints(folder: str) -> None:
    """A checkpoint that is not whole is none. What it stood for is still in the entries below it: these go only when it
    is on disk."""
    pointed = _pointed_at(folder)
    if pointed is None and not storage.exists(log_path(folder, _POINTER)):
        return  # there is none, or it has been dropped: who reads looks for the newest that is whole
    if pointed is not None and _is_parquet(log_path(folder, f"{pointed:020d}.checkpoint.parquet")):
        return
    found = checkpoints_of(folder, storage.names(log_path(folder)))
    if pointed in found and all(map(_is_parquet, found[pointed])):
        return
    for files in found.values():
        if not all(map(_is_parquet, files)):
            for file in files:
                storage.delete(file)
    _drop_pointer(folder)
    log.warning("%s: a checkpoint had not reached the disk, and is taken away", folder)


def cure(root: str, folder: str) -> None:
    """Before a load writes the table in `folder` anew: whatever its files hold, it can."""
    drop_torn_checkpoints(folder)
    loss = first_loss(folder, base(folder))
    if loss is not None and loss.newest:
        cut_back(folder, loss.version)
    if is_damaged(folder):
        set_aside(root, folder)


def is_damaged(folder: str) -> bool:
    """Whether the log of the table in `folder` cannot be read to its end."""
    names = storage.names(log_path(folder))
    entries = entries_of(names)
    whole = [v for v, files in checkpoints_of(folder, names).items() if all(map(_is_parquet, files))]
    base = max(whole, default=-1)
    above = [version for version in entries if version > base]
    if not entries:
        return bool(by_version(names))
    return above != list(range(base + 1, base + 1 + len(above))) or any(read_actions(folder, v) is None for v in above)


def begin_anew(root: str, tables: Iterable[str]) -> None:
    """Set aside what the lake knows of itself, with the logs of the tables in these folders: their commits carry
    generations and positions that nothing tells the meaning of any more."""
    for folder in (*tables, validations_path(root), ledger_path(root), registry_path(root)):
        if storage.is_folder(log_path(folder)):
            set_aside(root, folder)
    storage.delete(position_file_path(root))


def set_aside(root: str, folder: str) -> None:
    """The log of the table leaves its folder, for whoever wants to look into it, and the table begins anew. Its data
    files are nobody's from then on."""
    place = damaged_path(root, os.path.relpath(folder, root))
    storage.delete_folder(place)
    storage.make_folder(place)
    storage.move_folder(log_path(folder), log_path(place))
    log.warning("the damaged log of %s is set aside: %s", folder, place)


def _mend_table(name: str, folder: str, durable: int | None) -> str:
    """Cut the table back, if need be; why it is damaged, or nothing."""
    drop_torn_checkpoints(folder)
    if durable is not None and read_actions(folder, durable) is None and base(folder) < durable:
        return f"{log_entry(folder, durable)} is missing, empty or cut short"
    loss = first_loss(folder, base(folder) if durable is None else durable)
    if loss is not None:
        cut_back(folder, loss.version)
        log.warning("%s goes on at version %d: %s", name, loss.version - 1, loss.what)
    return ""


def base(folder: str) -> int:
    """The newest checkpoint's version; -1: there is none."""
    return max(checkpoints_of(folder, storage.names(log_path(folder))), default=-1)


def _lost_file(folder: str, commits: list[tuple[int, list[Action]]]) -> tuple[int, str] | None:
    """Of the files that these commits have added, and that are live behind the last of them, the first that is not as
    its entry says; with the version that added it."""
    live: dict[str, tuple[int, Action]] = {}
    for version, actions in commits:
        for action in actions:
            if "remove" in action:
                live.pop(action["remove"]["path"], None)
        for action in actions:
            if "add" in action:
                live[action["add"]["path"]] = version, action["add"]
    sizes: dict[str, int] = {}
    for version, add in sorted(live.values(), key=lambda found: found[0]):
        for path, size, exactly in _files_of(folder, add):
            if path not in sizes:
                sizes[path] = _size(path)
            if sizes[path] < size or (exactly and sizes[path] != size):
                shown = "is missing" if sizes[path] < 0 else f"has {sizes[path]} bytes, and its entry says {size}"
                return version, f"{path} {shown}"
    return None


def _files_of(folder: str, add: Mapping[str, Any]) -> Iterator[tuple[str, int, bool]]:
    """Paths and bytes of a data file and of its vector; whether it is exactly so many: vectors share files."""
    yield os.path.join(folder, unquote(add["path"])), int(add["size"]), True
    vector = add.get("deletionVector")
    if vector and (path := vector_file(folder, vector)) is not None:
        yield path, int(vector.get("offset") or 0) + int(vector["sizeInBytes"]) + 8, False


def _size(path: str) -> int:
    try:
        return storage.info(path).size
    except FileNotFoundError:
        return -1


def _is_parquet(file: str) -> bool:
    size = _size(file)
    return size >= _LEAST_PARQUET and storage.read_range(file, size - 4, 4) == _PARQUET_END


def _pointed_at(folder: str) -> int | None:
    """The checkpoint that readers begin at; None: there is no such file, or it is not whole."""
    try:
        return int(json.loads(storage.read_text(log_path(folder, _POINTER)))["version"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return None


def _drop_pointer(folder: str) -> None:
    storage.delete(log_path(folder, _POINTER))
    storage.delete(log_path(folder, f".{_POINTER}.crc"))


# The lake


def _folders(root: str, tables: Iterable[TableRecord]) -> Iterator[tuple[str, str]]:
    """Tables and histories that a driver goes on with, by their names in ledger rows."""
    for record in tables:
        if record.state in _REPLICATED:
            yield record.name, table_path(root, record.path)
            if record.schemas and record.schema.history:
                yield history_name(record.name), table_path(root, record.path + HISTORY)


def _mend_ledger(root: str, confirmed_lsn: int | None) -> None:
    """From the first row on that is not whole they go, if what is left reaches what the source was told."""
    loss = first_loss(ledger_path(root), base(ledger_path(root)))
    if loss is None:
        return
    left = epoch_at_version(root, loss.version - 1)
    if not loss.newest and confirmed_lsn is not None and (left is None or left.position.lsn < confirmed_lsn):
        raise DamagedLake(f"{loss.what}: what was written behind it is in doubt")
    cut_back(ledger_path(root), loss.version)


def _drop_void_rows(root: str, confirmed_lsn: int, folders: Mapping[str, str]) -> None:
    """Rows above the slot's position that name a version which is not there go, and all above them."""
    tops = {name: max(entries_of(storage.names(log_path(folder))), default=-1) for name, folder in folders.items()}

    def is_void(epoch: Epoch) -> bool:
        return any(version.version > tops.get(name, version.version) for name, version in epoch.tables.items())

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


def _lock(root: str) -> str:
    return os.path.join(control_path(root), "recovery.lock")
