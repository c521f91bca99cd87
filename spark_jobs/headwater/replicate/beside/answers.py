"""What a driver answers to loads and reloads (`headwater.lake.reload_records`), and what is open between them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from headwater.gate import lease
from headwater.lake.registry import Registry, now_text
from headwater.lake.reload_records import Keeping, Reload, is_open
from headwater.source.connection import Session


@dataclass(frozen=True, slots=True)
class Answers:
    """`generation`: the driver's; `session`: at the source, where it shows whether a job lives. `check_fence` raises
    Fenced behind a successor's generation."""

    registry: Registry
    session: Session
    generation: int
    check_fence: Callable[[], None]

    def keeping(self, name: str, table: str, from_lsn: int = 0) -> Keeping:
        """The answer to the load or reload `name`, not given yet: the table's changes above `from_lsn` are kept."""
        return Keeping(name, table, "keeping", self.generation, from_lsn, now_text())

    def keep(self, name: str, table: str, from_lsn: int) -> Keeping:
        """The job hears that its table's changes are kept from now on: not from a driver whose slot another one has,
        which has not kept what that one reads."""
        self.check_fence()
        answer = self.keeping(name, table, from_lsn)
        self.registry.write(answer)
        return answer

    def refuse(self, name: str, table: str, reason: str) -> None:
        """The job hears that its table's changes cannot be kept."""
        self.check_fence()
        self.registry.write(self.keeping(name, table).ended("failed", now_text(), reason))

    def open_reloads(self) -> Iterator[Reload]:
        """Those that wait for this driver."""
        for reload in list(self.registry.reloads.values()):
            if is_open(reload, self.registry.kept.get(reload.name)):
                yield reload

    def lives(self, job: str) -> bool:
        """Whether the session of that name at the source is there."""
        return self.session.ask(partial(lease.is_alive, session=job))
