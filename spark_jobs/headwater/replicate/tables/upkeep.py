"""Files and checkpoints of the tables, behind the ledger: rows stay what they are."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace

from headwater.apply.applier import Applier, overwriting_named
from headwater.errors import TableError
from headwater.lake.cuts import HISTORY
from headwater.lake.history import history_record
from headwater.lake.registry import TableRecord
from headwater.maintain.caretaker import Caretaker
from headwater.replicate.batches.lanes import Result
from headwater.replicate.batches.retries import Retries, reason_of
from headwater.replicate.tables.attempts import Attempts
from headwater.replicate.tables.histories import Histories
from headwater.replicate.tables.joining import Joining
from headwater.replicate.tables.states import TableStates

log = logging.getLogger(__name__)


class TableUpkeep:
    def __init__(
        self,
        states: TableStates,
        joining: Joining,
        attempts: Attempts,
        retries: Retries,
        histories: Histories,
        applier: Applier,
        caretaker: Caretaker,
    ) -> None:
        self._states, self._versions, self._joining = states, states.versions, joining
        self._attempts, self._retries, self._histories = attempts, retries, histories
        self._applier, self._caretaker = applier, caretaker

    def written(self, names: Iterable[str]) -> None:
        """A row was published: the caretaker learns what has more versions now."""
        owners = ((name, self._states.owner(name)) for name in names)
        self._caretaker.written(record if record.name == name else history_record(record) for name, record in owners)

    def keep_up(self, name: str) -> Result:
        """In the table's lane, behind the ledger. The new version goes into the next row that names the table."""
        record = self._states.records[name]
        if not record.is_followed or self._attempts.is_doubtful(name):  # a suspended table stays as it is
            return Result()
        before = self._versions.of(name)
        try:
            self._keep_up(record)
        except TableError as error:
            self._states.suspend(name, error)
            return Result(self._versions.moved_since(name, before), error)
        except Exception as error:
            self._retries.refuse_outage(error)
            log.warning("%s: its upkeep failed, and comes again behind a later commit: %s", name, reason_of(error))
            self._attempts.doubt(name)
        return Result(self._versions.moved_since(name, before))

    def _keep_up(self, record: TableRecord) -> None:
        version = self._versions[record.name]
        with overwriting_named(record.name):
            now = self._applier.keep_up(self._states.folder(record), record.schema, version.version)
            if now != version.version:
                self._versions[record.name] = replace(version, version=now, rows=0, touched=False)
            self._histories.keep_up(record.name)

    def next(self, is_idle: Callable[[str], bool]) -> str | None:
        """The table, among those whose lanes are idle, that is to have a turn for its upkeep though nothing came."""
        if not self._applier.upkeep_waits:
            return None
        owners: dict[str, str] = {}
        for name in self._states.followed():
            unsettled = self._attempts.is_doubtful(name) or name in self._joining.catching_up
            if not unsettled and is_idle(name):
                folder = self._states.folder(self._states.records[name])
                owners |= dict.fromkeys((folder, folder + HISTORY), name)
        chosen = self._applier.next_upkeep(owners)
        return owners[chosen] if chosen is not None else None

    def leave(self, name: str) -> None:
        """The table is written anew by a load."""
        self._caretaker.leave(name)

    def close(self) -> None:
        self._caretaker.close()
