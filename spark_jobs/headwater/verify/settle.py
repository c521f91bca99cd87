"""What a difference between source and lake is: pure, and the same for the first look and the later ones.

A key is looked at on both sides, at a capture point and in the lake's version that holds it. While the source
writes, the lake's version holds more than the capture point saw; so a key counts as different only when neither
its source row nor its lake row has changed between two looks at both of which they differ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class SourceRow:
    """`count`: rows under the key. `origin`: the transaction that wrote the row: every update changes it."""

    count: int = 0
    digest: str = ""
    origin: int = 0


@dataclass(frozen=True, slots=True)
class LakeRow:
    """`count`: rows under the key, with the least and greatest of their digests. `file`: where they lie: a row that
    was removed and put back lies in another file."""

    count: int = 0
    lowest: str = ""
    highest: str = ""
    file: str = ""


@dataclass(frozen=True, slots=True)
class State:
    """One key on both sides. In a multiset the key is the row, and only the counts tell."""

    source: SourceRow = SourceRow()
    lake: LakeRow = LakeRow()

    @property
    def agrees(self) -> bool:
        return self.source.count == self.lake.count and (
            not self.source.count or self.source.digest == self.lake.lowest == self.lake.highest
        )

    @property
    def missing(self) -> int:
        return max(0, self.source.count - self.lake.count)

    @property
    def extra(self) -> int:
        """Rows too many: a duplicate is one."""
        return max(0, self.lake.count - self.source.count)

    @property
    def different(self) -> int:
        both = self.source.count and self.lake.count
        return int(bool(both) and self.source.digest not in (self.lake.lowest, self.lake.highest))

    @property
    def kind(self) -> str:
        return "missing" if self.missing else "different" if self.different else "extra"


@dataclass(slots=True)
class Settled:
    """`differing`: keys (by number) that differ for certain. `unsettled`: keys that changed between all looks."""

    differing: dict[int, State] = field(default_factory=dict)
    unsettled: set[int] = field(default_factory=set)


def settle(keys: Sequence[int], look: Callable[[Sequence[int]], Mapping[int, State]], rounds: int) -> Settled:
    """Look at `keys`, all of which differed once, until each is known to agree or to differ; at most `rounds` times.

    `look` is asked for the keys still open and leaves out those that are on neither side.
    """
    result = Settled(unsettled=set(keys))
    before: Mapping[int, State] = {}
    for _ in range(rounds):
        if not result.unsettled:
            break
        now = look(sorted(result.unsettled))
        for key in list(result.unsettled):
            state = now.get(key, State())
            if state.agrees:
                result.unsettled.discard(key)
            elif before.get(key) == state:
                result.differing[key] = state
                result.unsettled.discard(key)
        before = now
    return result
