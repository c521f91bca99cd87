"""What a job and a running driver say to each other about a table that is being loaded or reloaded: two records of the
registry, each with one writer.

The job asks (`Reload`, or a table's state "loading"); the driver answers that it keeps the table's changes (`Keeping`),
and at last what has become of it. Whoever of them dies, the other one and the next driver know all that was agreed.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import datetime
from typing import TYPE_CHECKING, Literal

from headwater.schema import Leaf, TableSchema

if TYPE_CHECKING:
    from headwater.lake.registry import TableRecord

ReloadState = Literal["asked", "read", "given up"]
KeepingState = Literal["keeping", "done", "failed"]


@dataclass(frozen=True, slots=True)
class Reload:
    """A part of a table is to be replaced by what the source holds; written by the job.

    `name`: of this reload, given once. `leaves`: relation ids of the partitions; empty: the whole table, or, with
    `keys`, the rows under the keys that lie in its folder, too, or with `where` the rows of that predicate, in its text
    (`headwater.pipeline_file.where_text`). `shown`: how a person names the part. `session`: the
    job's application_name at the source, which says whether it lives. `unknown`: partitions that the table is to know
    from now on.
    When it is "read": `snapshot`, `capture_lsn` as of `headwater.lake.registry.Capture`; `rows` rows lie in the folder
    of its name (`headwater.apply.replacement`), or in files that are listed there (`headwater.apply.waiting_files`).
    Without a snapshot they were read in the lake, where `capture_lsn` was applied. `shape`: the table is to be in that
    shape afterwards (`headwater.reload.rebuild`).
    `suspended`: since when the table was suspended when this was asked, if nobody follows it: the part is put right as
    of the capture point, and the table stays suspended.
    """

    name: str
    table: str
    incarnation: int
    leaves: tuple[int, ...]
    shown: str
    session: str
    state: ReloadState
    since: str
    snapshot: str = ""
    capture_lsn: int = 0
    rows: int = 0
    keys: bool = False
    unknown: tuple[Leaf, ...] = ()
    where: str = ""
    shape: TableSchema | None = None
    suspended: str = ""

    @property
    def done(self) -> str:
        """What happens to the part, for people."""
        return "rebuilt" if self.shape is not None else "reloaded"

    def overlaps(self, other: Reload) -> bool:
        """Whether both may be of one row of the same table, as far as can be told without knowing what `where` is true
        of."""
        if (self.table, self.incarnation) != (other.table, other.incarnation):
            return False
        return not self.leaves or not other.leaves or bool(set(self.leaves) & set(other.leaves))


@dataclass(frozen=True, slots=True)
class Keeping:
    """The driver's answer, under the name of the reload or load that it is for.

    "keeping": every change of the table that is committed above `from_lsn` is kept. "done": the part stands in the
    table's `version`, which is published with the first epoch at or above `lsn`; `replaced`: rows whose place it took.
    "failed": nothing was changed, for `reason`.
    """

    name: str
    table: str
    state: KeepingState
    generation: int
    from_lsn: int
    since: str
    version: int | None = None
    lsn: int = 0
    replaced: int = 0
    reason: str = ""

    def ended(self, state: KeepingState, since: str, reason: str = "") -> Keeping:
        return replace(self, state=state, since=since, reason=reason)


def is_open(reload: Reload, answer: Keeping | None) -> bool:
    """Whether something of it is still to come. `answer`: the driver's, if there is one."""
    if answer is not None:
        return reload.state != "given up" and answer.state == "keeping"
    # What was read had been answered: an older Headwater thinned that out when it was done, and this not.
    return reload.state == "asked"


def is_past(reload: Reload | None, answer: Keeping | None, before: datetime) -> bool:
    """Whether nobody will ask any more for what job and driver said to each other under one name, when old records are
    thinned out: it has ended, and nothing was said since `before`. Both go at once: a reload without its answer would
    look like one that has none yet."""
    over = answer.state != "keeping" if answer is not None else reload is not None and not is_open(reload, None)
    return over and all(datetime.fromisoformat(one.since) < before for one in (reload, answer) if one is not None)


def load_name(record: TableRecord) -> str:
    """The name under which a driver keeps what a load of `record`, at its incarnation, has not read."""
    return f"load.{record.path.replace('/', '.')}.{record.incarnation}"
