"""What pollers read of a lake: position file, registry and ledger, without Spark and without the source.

One `LakeReader` per waiting process: it reads the position file at each look, and registry and ledger only when
their Delta version has moved. A position file with a lower (generation, read position) than one already seen is a
late writer's and is ignored. Arrow and delta-rs are imported on first use: Airflow parses what imports this.
"""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from headwater.errors import Refused, Transient
from headwater.lake.freshness import IN_STEP, Look, TableState
from headwater.lake.paths import position_file_path
from headwater.lake.position_file import PositionFile, read_position_file
from headwater.position import format_lsn

if TYPE_CHECKING:
    from headwater.lake.ledger import Epoch
    from headwater.lake.registry import Registry, TableRecord


class LakeReader:
    """The lake of one pipeline under `root`, as a poller sees it. Not thread-safe."""

    def __init__(self, root: str, pipeline: str) -> None:
        self._root = root
        self._pipeline = pipeline
        self._registry: Registry | None = None
        self._file: PositionFile | None = None
        self._epoch: Epoch | None = None

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
        try:
            found = read_position_file(self._root)
        except (ValueError, KeyError, TypeError) as error:
            raise Refused(
                f"the position file cannot be read ({type(error).__name__})",
                code="damaged_position_file",
                where=position_file_path(self._root),
                remedy="remove it: it is a cache of the ledger, and the next driver writes it anew",
            ) from error
        if found is None and self._file is None:
            found = self._from_ledger()
        if found is not None and (self._file is None or _rank(found) >= _rank(self._file)):
            self._file = found
        return self._file

    def registry(self) -> Registry | None:
        """The registry as it is now; None when nothing was ever loaded."""
        from headwater.lake.registry import Registry

        if self._registry is None:
            self._registry = Registry.open(self._root, self._pipeline)
        else:
            self._registry.refresh()
        return self._registry

    def epoch(self, number: int) -> Epoch:
        """Epoch `number` with all its tables; Transient when the ledger has no such row."""
        from headwater.lake.ledger import read_epoch

        if self._epoch is None or self._epoch.epoch != number:
            found = read_epoch(self._root, number)
            if found is None:
                raise Transient(
                    f"the ledger has no row of epoch {number}, which the position file names",
                    where=f"pipeline {self._pipeline}",
                    remedy="try again; if it stays, `headwater verify` shows what the lake holds",
                )
            self._epoch = found
        return self._epoch

    def first_sample(self, moment: datetime) -> tuple[datetime, int] | None:
        """The driver's sample with the lowest LSN among those at or after `moment`, from all that the ledger has."""
        from headwater.lake.ledger import first_sample

        log = _log_of(self.file())
        return first_sample(self._root, moment, log) if log is not None else None

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
        )


def _rank(file: PositionFile) -> tuple[int, int]:
    return file.generation, file.read_position


def _log_of(file: PositionFile | None) -> tuple[str, int] | None:
    return (file.position.system_id, file.position.timeline) if file is not None else None


def _state_of(record: TableRecord, file: PositionFile | None) -> TableState:
    """The registry decides, unless the driver says in its file that a table is not (or not yet) in step."""
    said = file.states.get(record.name) if file is not None else None
    trying = file.retrying.get(record.name) if file is not None else None
    if record.state == IN_STEP and said is None and trying is not None:
        reason = f"tried again since {trying['since']}, {trying['attempts']} failed: {trying['reason']}"
        return TableState(record.state, reason, "", record.since, record.path)
    if record.state != IN_STEP or said is None:
        return TableState(record.state, record.reason, record.remedy, record.since, record.path)
    if said.get("since", "") >= record.since:
        return TableState(said["state"], said.get("reason", ""), record.remedy, said.get("since", ""), record.path)
    # The registry is newer: the table has come back, and the driver's next epoch takes it in.
    assert file is not None
    reason = (
        f"in step again, but not yet in a published epoch (newest: {file.epoch} at {format_lsn(file.position.lsn)})"
    )
    return TableState("catching up", reason, "", record.since, record.path)
