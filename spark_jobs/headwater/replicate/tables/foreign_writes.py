"""Where each table stands is read from its log; what others wrote to it since suspends it, unless all is still as the
log says it and what is written next fits.

A table is read as the driver begins, behind a load, after a lost race and after a failure. In between its next commit
would notice, and one to which nothing comes is looked at by the names of its log's files.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterable
from typing import Final

from headwater.apply.applier import overwriting_named
from headwater.delta import entries, storage
from headwater.delta.foreign_terms import foreign_terms, why_unwritable
from headwater.delta.log_entries import log_entry
from headwater.delta.tables import current, foreign_data, is_ours, own_history, replaced_below
from headwater.errors import ForeignWrite, TableError
from headwater.lake.cuts import HISTORY, history_name, table_of
from headwater.lake.ledger import TableVersion
from headwater.lake.registry import TableRecord
from headwater.lake_root import is_remote
from headwater.position import format_lsn
from headwater.replicate.batches.lanes import Result
from headwater.replicate.batches.retries import Retries, reason_of
from headwater.replicate.tables.histories import Histories
from headwater.replicate.tables.states import TableStates

log = logging.getLogger(__name__)

Look = Callable[[str, str, tuple[int, int] | None], tuple[int, int] | None]
"""As `headwater.delta.tables.current`."""
_GONE: Final = "the Delta table is gone from the lake"


class ForeignWrites:
    def __init__(self, pipeline: str, states: TableStates, histories: Histories, retries: Retries) -> None:
        self._pipeline, self._states, self._histories, self._retries = pipeline, states, histories, retries
        self._versions = states.versions
        self.met: Counter[str] = Counter()
        """How often somebody else's commits were met, by table: what is known of its columns counts until then."""

    def read(self, record: TableRecord, known: TableVersion | None, look: Look = current) -> None:
        """Where the table stands now. `known`: where it stood, by this driver or the ledger."""
        path, app_id = self._states.folder(record), record.app_id(self._pipeline)
        replaced: ForeignWrite | None = None
        try:
            with overwriting_named(record.name):
                entries.refuse_replaced(path)
        except ForeignWrite as error:
            replaced = error
        found = look(path, app_id, (known.version, known.applied_lsn) if known is not None else None)
        if found is None:
            self._states.suspend(record.name, _foreign(record.name, _GONE), again=True)
            return
        version, applied_lsn = found
        stands, problem = TableVersion(version, applied_lsn, record.state, incarnation=record.incarnation), ""
        if record.is_followed and replaced is None:
            entries.meet(path, version)  # before it is read: what takes its place from now on is noticed
            # Should it not be readable now, where the table stood is still what the next look begins with.
            problem = self._what_others_did(record, known, version, applied_lsn)
        self._versions[record.name] = stands
        if problem:
            self._states.suspend(record.name, _foreign(record.name, problem))
        elif record.is_followed and replaced is not None:
            self._states.suspend(record.name, replaced)

    def _what_others_did(self, record: TableRecord, known: TableVersion | None, version: int, applied_lsn: int) -> str:
        """Why the table, which stands at this version and position, must not be written on; empty if it may."""
        path, app_id = self._states.folder(record), record.app_id(self._pipeline)
        # Known since this load: what the ledger says of the one before lies below the capture point.
        if known is not None and known.applied_lsn >= record.start_lsn > 0 and applied_lsn < known.applied_lsn:
            fell = f"from {format_lsn(known.applied_lsn)} to {format_lsn(applied_lsn)}"
            return f"its applied position fell back {fell}: commits are lost"
        commits = own_history(path, version, app_id, known.version if known is not None else None)
        problem = (
            foreign_data(commits, app_id)
            or replaced_below(path, commits, version)
            or foreign_terms(path, commits, app_id, appended_to=record.schema.insert_only)
        )
        others = [commit for commit in commits if not is_ours(commit, app_id)]
        if others and not problem:
            accepted = ", ".join(commit.described for commit in others)
            log.info("%s: accepted what others did to its files and settings: %s", record.name, accepted)
        return problem

    def look_again(self, record: TableRecord) -> None:
        """Somebody else has committed to the table, of which we thought to know where it stands."""
        self._states.read_again()  # what it was asked to make of the table
        self.read(record, self._versions[record.name])
        self.met[record.name] += 1

    def refuse_lost(self, name: str) -> None:
        """ForeignWrite when what was met has suspended the table."""
        if not self._states.is_followed(name):
            now = self._states.records[name]
            raise ForeignWrite(now.reason, where=name, remedy=now.remedy)

    def has_news(self, name: str) -> bool:
        """Whether the logs of the table or its history are not as this driver knows them: an entry is there that is not
        ours, in the place of one of ours, or missing; or they cannot be looked at. It costs some looks at names."""
        standing = self._versions.of(name)
        try:
            return any(
                not entries.stands(path, standing[own].version)
                or storage.token(log_entry(path, standing[own].version + 1)) is not None
                for own, path in self.folders(name).items()
                if own in standing
            )
        except OSError:
            return True  # this table's trouble, as its lane will find

    def look_at_others(self, name: str) -> Result:
        """In its lane: what somebody else has done to a table that nobody writes here. It is suspended, or goes on from
        there."""
        if not self._states.is_followed(name) or not self.has_news(name):
            return Result()
        record, before = self._states.records[name], self._versions.of(name)
        error: TableError | None = None
        try:
            self.look_again(record)
            self.refuse_lost(name)
            if record.schema.history:
                self._histories.look_again(record)
        except TableError as found:
            error = found
            self._states.suspend(name, found)
        except Exception as failed:
            self._retries.refuse_outage(failed)
            log.warning("%s: what others have done to it cannot be read: %s", name, reason_of(failed))
        return Result(self._versions.moved_since(name, before), error)

    def suspend_replaced(self, names: Iterable[str]) -> bool:
        """Before a row names them, by their names in ledger rows: suspend the tables of which another program has
        overwritten a commit that was ours. Whether there are any. In a store, where each look is a request, the next
        commit looks (`headwater.delta.delta_log.commit`), and the look at idle tables."""
        found = False
        for name in {table_of(name) for name in names}:
            if not self._states.is_followed(name):
                continue
            try:
                with overwriting_named(name):
                    for path in self.folders(name).values():
                        if not is_remote(path):
                            entries.refuse_replaced(path)
            except ForeignWrite as error:
                self._states.suspend(name, error)
                self.read(self._states.records[name], None)
                self._states.next_row.note(self._versions.of(name))
                found = True
            except OSError as error:
                log.warning("%s: its log cannot be looked at: %s", name, reason_of(error))  # its next commit will tell
        return found

    def meet_unfollowed(self, name: str) -> None:
        """In its lane: where a suspended table stands, whatever rows others have written. ForeignWrite where what is
        written next would not fit."""
        record = self._states.records[name]
        path, app_id = self._states.folder(record), record.app_id(self._pipeline)
        entries.forget(path)
        problem = why_unwritable(path, app_id, appended_to=record.schema.insert_only)
        stands = current(path, app_id)
        if problem or stands is None:
            raise _foreign(name, problem or "its Delta table is gone")
        self._versions[name] = TableVersion(*stands, record.state, incarnation=record.incarnation)

    def folders(self, name: str) -> dict[str, str]:
        """Of the table and its history, by their names in ledger rows."""
        record = self._states.records[name]
        folders = {name: self._states.folder(record)}
        if record.schemas and record.schema.history:
            folders[history_name(name)] = folders[name] + HISTORY
        return folders

    def forget(self, name: str) -> None:
        """The table is written anew: whatever comes is no news."""
        for path in self.folders(name).values():
            entries.forget(path)


def _foreign(name: str, problem: str) -> ForeignWrite:
    return ForeignWrite(problem, where=name, remedy=f"headwater load PIPELINE.yaml --table {name} --again")
