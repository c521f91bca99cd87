"""A batch by table, and what a lane does with its table's share: keep it for whoever asked for that, and commit it."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from headwater.log.blocks import Transactions
from headwater.replicate.batches.batch import Batch, Share
from headwater.replicate.batches.lanes import Result
from headwater.replicate.batches.retries import Retries
from headwater.replicate.tables.commits import TableCommits
from headwater.replicate.tables.keeper import Keeper
from headwater.replicate.tables.owners import Owners
from headwater.replicate.tables.states import TableStates

Attempt = Callable[[str, Callable[[], None]], Result]


class Shares:
    def __init__(
        self,
        states: TableStates,
        owners: Owners,
        keeper: Keeper,
        commits: TableCommits,
        retries: Retries,
        attempt: Attempt,
    ) -> None:
        """`attempt`: work on one table, as `headwater.replicate.tables.attempts` does it."""
        self._states, self._owners, self._keeper = states, owners, keeper
        self._commits, self._retries, self._attempt = commits, retries, attempt

    def of(self, batch: Batch) -> dict[str, Share]:
        """The batch by table: only tables that are followed now, or whose changes are kept."""
        shares: dict[str, Share] = {}
        if (ddl := batch.ddl) is not None:
            self._owners.ask_again(ddl)
        for chunk in batch.chunks:
            for block in chunk.blocks:
                name = self._owners.table_for(block, batch.transactions)
                if name is not None and self._is_wanted(name):
                    shares.setdefault(name, Share()).blocks.append(block)
            for truncate in chunk.truncates:
                for name in {self._owners.owner(i) for i in truncate.relation_ids} - {None}:
                    if name is not None and self._is_wanted(name):
                        shares.setdefault(name, Share()).truncates.append(truncate)
        return shares

    def _is_wanted(self, name: str) -> bool:
        return self._states.is_followed(name) or self._keeper.keeps(name)

    def apply(self, name: str, share: Share, transactions: Transactions, still_alive: Callable[[], None]) -> Result:
        """In the table's lane. Raises what is not the table's own failure."""
        unread = self._states.records[name].unread
        try:
            self._keeper.keep(name, share, transactions, unread)
        except OSError as error:
            self._states.check_fence()  # a driver that has taken over removes what nobody waits for any more
            self._retries.refuse_outage(error)
            raise
        if not self._states.is_followed(name) or self._keeper.holds_back(name):
            return Result(skipped=True)
        if unread:  # what they hold is to come by their reload
            share = share.without(unread)
            if not (share.blocks or share.truncates):
                return Result()
        return self._attempt(name, partial(self._commits.commit_share, name, share, transactions, still_alive))
