"""What one wait is asked for: the value that goes from the command, the sensor or a stored trigger to the `Waiter`, and
how the names that a person gives become it.

It starts without Spark and without PostgreSQL's driver: Airflow makes triggers of what it has stored.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime, timedelta
from typing import Any

from headwater.errors import Refused
from headwater.lake.requirements import (
    AtPosition,
    MaxStaleness,
    Now,
    Requirement,
    Since,
    Target,
    parse_requirement,
)
from headwater.names import TableName

Partitions = Mapping[TableName, Sequence[TableName]]


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitRequest:
    """What is wanted, for how long it may be waited for, and by whom.

    `wanted` may be a `Target` that an earlier process has pinned: it is then not taken anew. `deadline` goes by this
    machine's clock, which is read once, when the wait begins here. `keep`: for how many seconds the cut is pinned, in
    the name of `owner`. `tables`: none: every one of the pipeline. `partitions`: of a table only these; a `Target` that
    knows them is not given them anew. `validated`: only what has passed a validation counts, of every table; a `Target`
    says by itself of which. `give_up_early`: end as timed out as soon as the time that is still to wait, as estimated,
    exceeds what is left.

    For the log of waits: `who` waits, the same for each run (empty: the wait is not in it), how the requirement is
    `called`, and when the wait `began`, if another process did.
    """

    wanted: Requirement | Target
    deadline: datetime
    keep: float
    owner: str
    tables: tuple[TableName, ...] = ()
    partitions: Partitions = field(default_factory=dict)
    validated: bool = False
    ignore_suspended: bool = False
    give_up_early: bool = False
    who: str = ""
    called: str = ""
    began: datetime | None = None

    @property
    def is_at_position(self) -> bool:
        """Whether somebody has named the position that is waited for, and no try takes another one."""
        return isinstance(self.wanted, AtPosition)

    def remaining(self) -> float:
        """Seconds to the deadline, negative behind it."""
        return (self.deadline - datetime.now(UTC)).total_seconds()

    def pinned(self, target: Target, tables: Iterable[str]) -> WaitRequest:
        """As it goes on in another process: for what it has turned out to be."""
        return replace(
            self,
            wanted=target,
            tables=parse_tables(tables),
            validated=False,
            partitions=self.partitions if not target.parts else {},
        )

    def unseen(self) -> WaitRequest | None:
        """As it goes on in another process before source or lake has answered; None where one of them has to say first
        what is wanted."""
        wanted = self.wanted
        if isinstance(wanted, Now):
            target = Target(now=True)
        elif isinstance(wanted, MaxStaleness):
            target = Target(max_staleness=wanted.seconds)
        elif isinstance(wanted, Since):
            target = Target(since=wanted.moment)
        elif isinstance(wanted, AtPosition) and wanted.timeline is not None:
            target = Target(wanted.lsn, wanted.timeline, wanted.system_id)
        else:
            return None
        tables = tuple(sorted(set(map(str, self.tables))))
        target = replace(target, validated=tables if self.validated else ())
        return replace(self.pinned(target, tables), validated=self.validated and not tables)

    def resumed(self, begun: Mapping[str, Any]) -> WaitRequest:
        """As another process has begun it, of which `begun` says when, for how long, for what target and tables, as
        `to_json` does."""
        began, deadline = (datetime.fromisoformat(begun[name]) for name in ("began", "deadline"))
        request = replace(self, began=began, deadline=deadline)
        return request.pinned(Target.from_json(begun["target"]), begun["tables"])

    def to_json(self) -> dict[str, Any]:
        """Plain values, once the target is pinned. Airflow's database holds them: what is added here must have a value
        that stands for its absence."""
        assert isinstance(self.wanted, Target)
        return {
            "tables": list(map(str, self.tables)),
            "target": self.wanted.to_json(),
            "deadline": self.deadline.isoformat(),
            "keep_seconds": self.keep,
            "owner": self.owner,
            "ignore_suspended": self.ignore_suspended,
            "give_up_early": self.give_up_early,
            "validated": self.validated,
            "who": self.who,
            "requirement": self.called,
            "began": self.began.isoformat() if self.began is not None else None,
            "partitions": {str(table): list(map(str, names)) for table, names in self.partitions.items()} or None,
        }

    @classmethod
    def from_json(cls, value: Mapping[str, Any]) -> WaitRequest:
        """Also from what an older version has stored, which lacks what was added since, or has what was given up."""
        began = value.get("began")
        return cls(
            wanted=Target.from_json(value["target"]),
            deadline=datetime.fromisoformat(value["deadline"]),
            keep=value["keep_seconds"],
            owner=value["owner"],
            tables=tuple(map(TableName.parse, value["tables"])),
            partitions=parse_partitions(value.get("partitions"), ()),
            validated=value.get("validated", False),
            ignore_suspended=value.get("ignore_suspended", False),
            give_up_early=value.get("give_up_early", False),
            who=value.get("who", ""),
            called=value.get("requirement", ""),
            began=datetime.fromisoformat(began) if began is not None else None,
        )


def asked(
    require: object,
    seconds: float,
    tables: Iterable[str | TableName] | None = None,
    partitions: Mapping[str, str | Sequence[str]] | None = None,
    *,
    keep: float,
    owner: str,
    who: str = "",
) -> WaitRequest:
    """What a person asks for, for so many seconds from now on. Refused for what is no requirement, and for names that
    are none."""
    wanted, names = parse_requirement(require), parse_tables(tables)
    return WaitRequest(
        wanted=wanted,
        deadline=deadline_in(seconds),
        keep=keep,
        owner=owner,
        tables=names,
        partitions=parse_partitions(partitions, names),
        who=who,
        called=str(wanted),
    )


def deadline_in(seconds: float) -> datetime:
    """The moment that lies so far ahead; the last one there is for a wait without an end."""
    try:
        return datetime.now(UTC) + timedelta(seconds=seconds)
    except OverflowError:
        return datetime.max.replace(tzinfo=UTC)


def parse_table(name: str | TableName) -> TableName:
    """A wanted table's name; Refused when it is none."""
    try:
        if not isinstance(name, str | TableName):  # a run's conf, or a template that gave something else
            raise ValueError(f"{name!r} is no table's name")
        return name if isinstance(name, TableName) else TableName.parse(name)
    except ValueError as error:
        raise Refused(str(error), code="bad_name", where="tables", remedy="write schema.table, as SQL does") from None


def parse_tables(names: Iterable[str | TableName] | None) -> tuple[TableName, ...]:
    if isinstance(names, str):  # which would be taken for its letters
        raise Refused(
            f"tables={names!r}: expected a list of names",
            code="bad_argument",
            where="tables",
            remedy=f"write [{names!r}]",
        )
    return tuple(map(parse_table, names or ()))


def parse_partitions(
    partitions: Mapping[str, str | Sequence[str]] | None, tables: Collection[TableName]
) -> dict[TableName, list[TableName]]:
    """The partitions of each table, as SQL names them; without a schema that of the table. Refused for a name that is
    none, and for a table that is not among `tables`, those that are waited for (none: all are)."""
    found: dict[TableName, list[TableName]] = {}
    if not isinstance(partitions, Mapping | None):  # a template that gave something else
        raise Refused(
            f"{partitions!r} names no partitions",
            code="bad_argument",
            where="partitions",
            remedy='give them by table, as {"public.orders": ["orders_2026_01"]}',
        )
    for table, names in (partitions or {}).items():
        parent = parse_table(table)
        if tables and parent not in tables:
            raise not_wanted(parent, "name it in tables, too")
        try:
            texts = [names] if isinstance(names, str) else names
            parsed = [TableName.parse(name, default_schema=parent.schema) for name in texts]
        except ValueError as error:
            raise Refused(str(error), code="bad_name", where="partitions", remedy="write it as SQL does") from None
        if parsed:
            found[parent] = parsed
    return found


def not_wanted(table: TableName, remedy: str) -> Refused:
    """Partitions are named of a table that is not waited for."""
    return Refused(
        f"partitions are named of {table}, which is not among the tables that are waited for",
        code="bad_argument",
        where="partitions",
        remedy=remedy,
    )
