"""Upkeep of the lake's own Delta tables (ledger, registry, validations): few files, a recent checkpoint, a short log.

The ledger gets a row and a file per epoch, 86,400 a day at one a second. Its rows are kept for good: gathered into
files they take a few bytes each, and no reader looks at more than the newest hundred. So are the rows of validations,
of which there are few. The registry gathers itself.
Readers look anew every time, so what was replaced an hour ago nobody reads any more.

A driver that publishes meanwhile loses one race at most, looks at the fence and appends behind: rows are rearranged,
never changed.
"""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from threading import Event

from headwater.delta import log_files
from headwater.delta.small_tables import LostRace, compact, open_table, write_checkpoint
from headwater.lake.paths import ledger_path, registry_path, validations_path
from headwater.maintain.cleanup import ORPHAN_SECONDS, Cleaned, clean

KEEP_SECONDS = 3600.0
_ENOUGH = 100
_TARGET = 8 << 20
_CHECKPOINT_EVERY = 50


@dataclass(frozen=True, slots=True)
class KeptTable:
    """One of them after its upkeep: data files of its newest version before and after, what was removed, and the
    version of its newest checkpoint (None: it has none yet)."""

    files_before: int
    files_after: int
    cleaned: Cleaned
    checkpoint: int | None


def keep_ledger(root: str, stop: Event, *, keep: float = KEEP_SECONDS, enough: int = _ENOUGH) -> KeptTable | None:
    """None: there is no ledger. `keep`: seconds for which replaced files stay; `enough`: small files that are worth
    making into one."""
    return _keep(ledger_path(root), stop, keep, enough)


def keep_registry(root: str, stop: Event, *, keep: float = KEEP_SECONDS) -> KeptTable | None:
    """None: there is no registry."""
    return _keep(registry_path(root), stop, keep, None)


def keep_validations(root: str, stop: Event, *, keep: float = KEEP_SECONDS, enough: int = _ENOUGH) -> KeptTable | None:
    """None: nothing was ever validated."""
    return _keep(validations_path(root), stop, keep, enough)


def _keep(folder: str, stop: Event, keep: float, enough: int | None) -> KeptTable | None:
    table = open_table(folder)
    if table is None:
        return None
    before = table.files
    small = sum(file.size < _TARGET for file in before)
    if enough is not None and small >= enough:
        with contextlib.suppress(LostRace):  # somebody else does the same just now
            compact(table, _TARGET)
    log = log_files.look(folder)
    checkpoint = max(log.checkpoints, default=-1)
    if log.newest - checkpoint >= _CHECKPOINT_EVERY:
        checkpoint = write_checkpoint(folder)
        log = log_files.look(folder)
    now = time.time()
    horizon = max(log.current_at(now - keep), log.oldest_readable)
    # A row's file is written milliseconds before its commit: after a day no writer is left that could still add it.
    orphans_before = now - ORPHAN_SECONDS
    cleaned = clean(folder, log, horizon, log_from=horizon, orphans_before=orphans_before, stop=stop)
    table.look()
    return KeptTable(len(before), len(table.files), cleaned, checkpoint if checkpoint >= 0 else None)
