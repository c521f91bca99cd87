"""Which tables the log has brought something for that no published position covers yet: `pending` of the position
file. Entered in the thread that receives, before the position that covers it can be read; from any thread."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterable

from headwater.log.blocks import Chunk


class Pending:
    """By table the (first, last) commit LSN of each chunk that waits. `owners`: the tables that relations belong to."""

    def __init__(self, owners: Callable[[Iterable[int]], set[str]]) -> None:
        self._owners = owners
        self._lock = threading.Lock()
        self._spans: dict[str, deque[tuple[int, int]]] = {}

    def arrived(self, chunk: Chunk) -> None:
        """Called before the chunk's position becomes readable."""
        transactions = chunk.transactions
        if not len(transactions):
            return
        first = int(transactions.end_lsn[0])
        last = int(transactions.end_lsn[-1])
        relations = {block.relation.relation_id for block in chunk.blocks}
        relations |= {relation_id for truncate in chunk.truncates for relation_id in truncate.relation_ids}
        names = self._owners(relations)
        with self._lock:
            for name in names:
                self._spans.setdefault(name, deque()).append((first, last))

    def passed(self, lsn: int) -> None:
        """What was published says all up to `lsn`."""
        with self._lock:
            for name in list(self._spans):
                spans = self._spans[name]
                while spans and spans[0][1] <= lsn:
                    spans.popleft()
                if not spans:
                    del self._spans[name]

    def since(self) -> dict[str, int]:
        """By table the first commit that waits."""
        with self._lock:
            return {name: spans[0][0] for name, spans in self._spans.items()}
