"""What pollers read of a lake: position file, registry and ledger, without Spark and without the source.

One `LakeReader` per waiting process, or for one wait after the other (`kept_readers`): it reads the position file at
each look, and registry and ledger only when their Delta version has moved. A position file with a lower (generation,
read position) than one already seen is a late writer's and is ignored. Arrow and delta-rs are imported on first use:
Airflow parses what imports this.
"""

from __future__ import annotations

import time
from datetime import UTC, datetime
from typing import TYPE_CHECKING

from headwater.errors import Transient
from headwater.lake.look import IN_STEP, Look, ReportedState
from headwater.lake.position_file import PositionFile, read_position_file
from headwater.position import Position, format_lsn

if TYPE_CHECKING:
    from headwater.lake.ledger import Epoch
    from headwater.lake.ledger_follower import FollowedLedger
    from headwater.lake.registry import Registry, TableRecord

_SETTLED_SECONDS = 1.0
"""A registry that was written so shortly before it was opened may be another one than the one that is looked at."""


class LakeReader:
    """The lake of one pipeline under `root`, as a poller sees it. Not thread-safe."""

    def __init__(self, root: str, pipeline: str) -> None:
        self._root = root
        self._pipeline = pipeline
        self._registry: Registry | None = None
        self._file: PositionFile | None = None
        self._epoch: Epoch | None = None
        self._ledger: FollowedLedger | None = None
        self._opened_at = 0.0
        self._anchor: tuple[str, float, int] | None = None

    @property
    def root(self) -> str:
        return self._root

    def begin_again(self, age: float) -> bool:
        """Be a new reader, but for what was read of registry and ledger. False when that cannot be gone on with: it is
        older than `age` seconds, or the lake is not known to be the same one."""
        if self._anchor is None or time.monotonic() - self._opened_at > age or _stamp(self._anchor[0]) != self._anchor:
            return False
        self._file = None  # of a new reader no position is the newest yet
        return True

    def look(self) -> Look:
        """One look: cheap enough for every 50 ms. Refused when the root belongs to another pipeline."""
        # The file first: a state that the registry shows is then never older than what the file claims.
        file = self.file()
        registry = self.registry()
        if registry is None:
            return Look(file, {}, _log_of(file))
        tables = {name: _state_of(record, file) for name, record in registry.tables.items()}
        record = registry.pipeline
        log = _log_of(file) or ((record.system_id, record.timeline) if record else None)
        return Look(file, tables, log, record.paused if record else "")

    def file(self) -> PositionFile | None:
        """The newest position file; without one, the ledger's newest epoch says the same less promptly."""
        found = read_position_file(self._root)
        if found is None and self._file is None:
            found = self._from_ledger()
        if found is not None and (self._file is None or _rank(found) >= _rank(self._file)):
            self._file = found
        return self._file

    def registry(self) -> Registry | None:
        """The registry as it is now; None when nothing was ever loaded."""
        from headwater.lake.registry import Registry

        if self._registry is None:
            began = time.time()
            self._registry = Registry.open(self._root, self._pipeline)
            if self._registry is not None:
                self._opened_at = time.monotonic()
                anchor = _stamp(self._registry.log_entry)
                self._anchor = anchor if anchor is not None and anchor[1] < began - _SETTLED_SECONDS else None
        else:
            self._registry.refresh()
        return self._registry

    def epoch(self, number: int) -> Epoch:
        """Epoch `number` with all its tables; Transient when the ledger has no such row."""
        from headwater.lake.ledger import read_epoch
        from headwater.lake.ledger_follower import FollowedLedger

        if self._epoch is None or not self._is(self._epoch, number):
            if self._ledger is None:
                self._ledger = FollowedLedger(self._root)
            found = self._ledger.epoch(number)
            if found is None or not self._is(found, number):
                self._ledger = None
                found = read_epoch(self._root, number)
            if found is None:
                raise Transient(
                    f"the ledger has no row of epoch {number}, which the position file names",
                    where=f"pipeline {self._pipeline}",
                    remedy="try again; if it stays, headwater verify PIPELINE.yaml shows what the lake holds",
                )
            self._epoch = found
        return self._epoch

    def _is(self, epoch: Epoch, number: int) -> bool:
        """Whether `epoch` is the one that is asked for, and the same that the position file names."""
        file = self._file
        same = file is None or file.epoch != number or (file.generation, file.position) == _identity(epoch)
        return epoch.epoch == number and same

    def first_sample(self, moment: datetime, newer: tuple[datetime, int] | None = None) -> tuple[datetime, int] | None:
        """The first of all samples in the ledger behind which nothing is that was committed before `moment`. `newer`:
        the first that the position file has."""
        from headwater.lake.ledger import first_sample

        log = _log_of(self.file())
        return first_sample(self._root, moment, log, newer) if log is not None else None

    def _from_ledger(self) -> PositionFile | None:
        from headwater.lake.ledger import read_epoch

        epoch = read_epoch(self._root)
        if epoch is None:
            return None
        # At its own position an epoch covers every change: nothing is pending there.
        sample = ((epoch.sample[0].astimezone(UTC).isoformat(), epoch.sample[1]),) if epoch.sample else ()
        return PositionFile(
            generation=epoch.generation,
            epoch=epoch.epoch,
            position=epoch.position,
            read_position=epoch.position.lsn,
            written_at="",
            samples=sample,
            states={name: {"state": held.state} for name, held in epoch.tables.items() if held.state != IN_STEP},
        )


def _identity(epoch: Epoch) -> tuple[int, Position]:
    return epoch.generation, epoch.position


def _stamp(file: str) -> tuple[str, float, int] | None:
    """What tells a file from another one of its name; None when there is none."""
    from headwater.delta import storage

    try:
        found = storage.info(file)
    except FileNotFoundError:
        return None
    return file, found.modified, found.size


def _rank(file: PositionFile) -> tuple[int, int]:
    return file.generation, file.read_position


def _log_of(file: PositionFile | None) -> tuple[str, int] | None:
    return (file.position.system_id, file.position.timeline) if file is not None else None


def _state_of(record: TableRecord, file: PositionFile | None) -> ReportedState:
    """The registry decides, unless the driver says in its file that a table is not (or not yet) in step."""
    said = file.states.get(record.name) if file is not None else None
    trying = file.retrying.get(record.name) if file is not None else None
    if record.state == IN_STEP and said is None and trying is not None:
        reason = f"tried again since {trying['since']}, {trying['attempts']} failed: {trying['reason']}"
        return ReportedState(record.state, reason, "", record.since, record.path)
    if record.state != IN_STEP or said is None:
        return ReportedState(record.state, record.reason, record.remedy, record.since, record.path)
    if said.get("since", "") >= record.since:
        return ReportedState(said["state"], said.get("reason", ""), record.remedy, said.get("since", ""), record.path)
    # The registry is newer: the table has come back, and the driver's next epoch takes it in.
    assert file is not None
    reason = (
        f"in step again, but not yet in a published epoch (newest: {file.epoch} at {format_lsn(file.position.lsn)})"
    )
    return ReportedState("catching up", reason, "", record.since, record.path)
