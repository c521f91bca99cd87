"""Preapply: what is done about large transactions while they are open, so that their commit costs only the tail.

The reader announces what it has written to disk; the stager process (`headwater.replicate.preapply.process`) nets it
and writes it as data files that no commit names. At the commit the driver asks for the result, if what was staged is
exactly what counts; else, and wherever staging did not pay or could not be done, the transaction is netted from its
blocks, which stay on disk until then. So staging may be given up at any moment, and never decides what is applied.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, replace
from os.path import join
from typing import Final

from headwater.apply.staged.files import StagedRows, sweep_staged
from headwater.delta import storage
from headwater.lake.paths import staged_path
from headwater.log.blocks import Block, Int64, Relation
from headwater.log.large import Announcement, Gone, OpenBlocks, place_of, rolled_back_of
from headwater.log.net.net_effect import PART_CHANGES
from headwater.log.spill import Spilled, SpillStore
from headwater.replicate.preapply.process import Finish, Forget, Stage, StagingAnswer, StagingTarget
from headwater.replicate.preapply.stager import Stager
from headwater.schema import TableSchema

log = logging.getLogger(__name__)

_AT_MOST: Final = 4
"""Open transactions that are staged at the same time: each has an index of keys in memory."""
_DISK_SHARE: Final = 0.5
"""Of the spill budget: beyond it everything on disk is left to those who cannot do without."""

Place = tuple[str, int]


@dataclass(slots=True)
class Worth:
    """Whether it pays to stage the next transaction: not while most of them are rolled back; then every eighth is
    tried."""

    committed: float = 1.0
    passed: int = 0

    def try_next(self) -> bool:
        if self.committed >= 0.25:
            return True
        self.passed += 1
        return self.passed % 8 == 0

    def ended(self, *, committed: bool) -> None:
        self.committed = 0.6 * self.committed + 0.4 * committed


@dataclass(slots=True)
class _Share:
    """One table's part of an open transaction: the blocks `sent`, each with what had been rolled back of it; `last`:
    the highest number of a change in them."""

    target: StagingTarget
    folder: str
    sent: dict[Place, tuple[tuple[int, int], ...]] = field(default_factory=dict)
    last: int = -1
    refused: str = ""
    rows: StagedRows | None = None

    def why_not(self, blocks: Sequence[Block], schema: TableSchema, done: int) -> str:
        """Why the result would not be what the committed `blocks` say, or not be worth having; empty if neither."""
        if self.refused:
            return self.refused
        if self.target.schema != schema:
            return "the table has changed"
        now = {place_of(block): rolled_back_of(block) for block in blocks}
        if any(now.get(place) != rolled_back for place, rolled_back in self.sent.items()):
            return "a part of it was rolled back after it had been staged"
        if any(block.content.first <= self.last for block in self.tail(blocks) if isinstance(block.content, Spilled)):
            return "earlier changes could not be staged"
        if 4 * done < sum(block.changes for block in blocks):
            return "most of it is still to be done"  # and netting in the driver is not held back
        return ""

    def tail(self, blocks: Sequence[Block]) -> tuple[Block, ...]:
        return tuple(block for block in blocks if place_of(block) not in self.sent)


@dataclass(slots=True)
class _Open:
    """An open transaction. `closed`: no further blocks are staged before its commit."""

    tables: dict[str, _Share] = field(default_factory=dict)
    closed: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class _Task:
    """A message to the stager, and who waits for the answer."""

    message: Stage | Finish | Forget
    share: _Share | None = None
    answer: Future[StagingAnswer] | None = None


class _Tasks:
    """What the stager is to do: first what a commit waits for, in order otherwise."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._waiting: list[_Task] = []
        self._closed = False

    def put(self, task: _Task) -> None:
        with self._changed:
            self._waiting.append(task)
            self._changed.notify()

    def close(self) -> None:
        with self._changed:
            self._closed = True
            self._changed.notify()

    def take(self) -> _Task | None:
        """The next one; waits for it. None: there will be no more."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._closed)
            if not self._waiting:
                return None
            wanted = {task.message.xid for task in self._waiting if isinstance(task.message, Finish)}
            urgent = (at for at, task in enumerate(self._waiting) if task.message.xid in wanted)
            return self._with_more(self._waiting.pop(next(urgent, 0)))

    def _with_more(self, task: _Task) -> _Task:
        """Blocks of the same table that wait as well: few large files are better than many small ones."""
        message = task.message
        if not isinstance(message, Stage):
            return task
        blocks = list(message.blocks)
        for other in [other for other in self._waiting if other.share is task.share is not None]:
            if not isinstance(other.message, Stage) or sum(block.changes for block in blocks) >= PART_CHANGES:
                break
            blocks += other.message.blocks
            self._waiting.remove(other)
        return replace(task, message=replace(message, blocks=tuple(blocks)))


class Staging:
    """The driver's side. `budget`: bytes of spilled blocks and all that is made of them; `target` says to which table
    of ours a relation belongs, None if it is not to be staged. What is announced before `begin` waits for it."""

    def __init__(self, root: str, budget: int, target: Callable[[Relation], StagingTarget | None]) -> None:
        self._root, self._budget, self._target = root, budget, target
        self._folder: str | None = None
        self._spill: SpillStore | None = None
        self._lock = threading.Lock()
        self._open: dict[int, _Open] = {}
        self._refused: set[int] = set()
        self._early: list[Announcement] = []
        self._worth = Worth()
        self._tasks = _Tasks()
        self._off = ""
        self._done: dict[tuple[int, str], int] = {}

    def begin(self, generation: int, spill_folder: str, is_behind: Callable[[], bool]) -> None:
        """This driver has the newest generation: what older ones have left goes, and staging may begin. `is_behind`:
        whether the applier has more to do than one batch."""
        sweep_staged(self._root, generation)
        with self._lock:
            self._folder = join(staged_path(self._root), str(generation))
            self._spill, self._is_behind = SpillStore(spill_folder, self._budget), is_behind
            early, self._early = self._early, []
            for item in early:
                self._take(item)
        self._thread = threading.Thread(target=self._work, name="headwater-staging", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Nothing is staged any more; the files go."""
        with self._lock:
            if self._folder is None:
                return
            self._off = "the driver ends"
        self._tasks.close()
        self._thread.join(timeout=10)
        storage.delete_folder(self._folder)

    def announced(self, item: Announcement) -> None:
        """In the receiving thread: never waits."""
        with self._lock:
            if self._folder is None:
                self._early.append(item)  # a transaction that was open when the driver started
            else:
                self._take(item)

    def _take(self, item: Announcement) -> None:
        if isinstance(item, Gone):
            self._refused.discard(item.xid)
            self._end(item.xid, committed=False)
        elif self._may_stage(item):
            self._stage(item)

    def collect(self, xid: int, name: str, schema: TableSchema, blocks: Sequence[Block]) -> StagedRows | None:
        """What was staged of the committed `blocks`, all that the transaction has done to the table, brought to its
        end; None: they are to be netted as they are. May be asked again."""
        with self._lock:
            transaction = self._open.get(xid)
            share = transaction.tables.get(name) if transaction is not None else None
            if transaction is None or share is None:
                return None
            if share.rows is not None:
                return share.rows
            transaction.closed = True
            reason = self._off or share.why_not(blocks, schema, self._done.get((xid, name), 0))
            answer: Future[StagingAnswer] = Future()
            if not reason:
                self._tasks.put(_Task(Finish(xid, name, share.tail(blocks)), share, answer))
        if not reason:
            found = answer.result()
            share.rows, reason = found.rows, found.refused
        if share.rows is not None:
            done = share.rows.changes - sum(block.changes for block in share.tail(blocks))
            log.info("%s: of transaction %d %d changes were staged before its commit", name, xid, done)
        if reason:
            share.refused = reason
            log.info("%s: transaction %d is applied as if nothing had been staged: %s", name, xid, reason)
        return share.rows

    def give_up(self, xid: int, name: str) -> None:
        """What was collected is not there any more."""
        with self._lock:
            share = self._open[xid].tables[name]
            share.rows, share.refused = None, "somebody has removed what was staged"

    def release(self, xids: Int64) -> None:
        """These transactions have been applied."""
        with self._lock:
            for xid in [xid for xid in (*self._open, *self._refused) if (xids == xid).any()]:
                self._refused.discard(xid)
                self._end(xid, committed=True)

    def _may_stage(self, item: OpenBlocks) -> bool:
        if item.xid in self._refused:
            return False
        known = self._open.get(item.xid)
        if known is not None and known.closed:
            return False
        reason = self._why_not_now(item)
        if not reason:
            self._open.setdefault(item.xid, _Open())
            return True
        log.debug("open transaction %d: no more is staged of it: %s", item.xid, reason)
        if known is not None:
            known.closed = True
        else:
            self._refused.add(item.xid)  # the blocks that follow are not its first
        return False

    def _why_not_now(self, item: OpenBlocks) -> str:
        if self._off or self._spill is None:
            return self._off or "the driver has not begun"
        if self._is_behind():
            return "there is enough to do without it"
        if self._spill.used() > _DISK_SHARE * self._budget:
            return "the disk is needed for the changes themselves"
        if item.xid in self._open:
            return ""
        if len(self._open) >= _AT_MOST:
            return "others are being staged"
        return "" if self._worth.try_next() else "most transactions are rolled back"

    def _stage(self, item: OpenBlocks) -> None:
        transaction = self._open[item.xid]
        by_table: dict[str, list[Block]] = {}
        for block in item.blocks:
            target = self._target(block.relation)
            if target is None:
                continue
            if target.name not in transaction.tables:
                folder = join(self._transaction_folder(item.xid), str(len(transaction.tables)))
                transaction.tables[target.name] = _Share(target, folder)
            by_table.setdefault(target.name, []).append(block)
        for name, blocks in by_table.items():
            share = transaction.tables[name]
            for block in blocks:
                place = place_of(block)
                assert place is not None
                share.sent[place] = rolled_back_of(block)
                assert isinstance(block.content, Spilled)
                share.last = max(share.last, block.content.last)
            self._tasks.put(_Task(Stage(item.xid, share.target, share.folder, tuple(blocks)), share))

    def _end(self, xid: int, *, committed: bool) -> None:
        if self._open.pop(xid, None) is not None:
            self._worth.ended(committed=committed)
            self._tasks.put(_Task(Forget(xid)))

    def _transaction_folder(self, xid: int) -> str:
        assert self._folder is not None
        return join(self._folder, str(xid))

    # The worker: one message to the stager at a time

    def _work(self) -> None:
        stager = Stager(self._root)
        try:
            while (task := self._tasks.take()) is not None:
                self._run(task, stager)
        finally:
            stager.close()

    def _run(self, task: _Task, stager: Stager) -> None:
        """Whatever becomes of the task, who waits for its answer is given one."""
        try:
            answer = self._answer(task, stager)
        except Exception as error:
            log.exception("staging failed, nothing more is staged in this run")
            self._off = f"staging failed: {error}"
            answer = StagingAnswer(refused=self._off)
        if task.answer is not None:
            task.answer.set_result(answer)

    def _answer(self, task: _Task, stager: Stager) -> StagingAnswer:
        message, share = task.message, task.share
        answer = StagingAnswer(refused="it was rolled back")
        if isinstance(message, Forget):
            if stager.is_running:
                self._ask(stager, message)
            storage.delete_folder(self._transaction_folder(message.xid))
            self._done = {key: changes for key, changes in self._done.items() if key[0] != message.xid}
        elif share is not None and (isinstance(message, Finish) or message.xid in self._open) and not share.refused:
            answer = self._ask(stager, message)
            share.refused = share.refused or answer.refused  # a commit may have refused it meanwhile
            if isinstance(message, Stage) and not answer.refused:
                key = message.xid, message.target.name
                self._done[key] = self._done.get(key, 0) + sum(block.changes for block in message.blocks)
                log.debug("%s: of open transaction %d %d changes are staged", key[1], key[0], self._done[key])
        elif share is not None and share.refused:
            answer = StagingAnswer(refused=share.refused)
        return answer

    def _ask(self, stager: Stager, message: Stage | Finish | Forget) -> StagingAnswer:
        if self._off:
            return StagingAnswer(refused=self._off)
        try:
            return stager.ask(message)
        except TimeoutError as error:
            self._off = f"the stager process stands still: {error}"
        except (EOFError, OSError) as error:
            self._off = f"the stager process died: {error or type(error).__name__}"
        log.warning("%s; nothing more is staged in this run", self._off)
        return StagingAnswer(refused=self._off)
