"""The errors of Headwater: one small tree, and the exit status that each branch means.

`Refused`: a person must act, a retry cannot help (exit 2). `Transient`: try again (exit 1). `TableError`: one
table cannot go on; caught at the table's border, where it becomes the state "suspended" (exit 4).
A freshness requirement that was not met (3) and differences found by `verify` (5) are results, not errors.

Every error says what failed (`message`), where (`where`: a file's key, a table, a server) and what to do
(`remedy`). None of them may carry a password or a row's value beyond its key.
"""

from __future__ import annotations

import re
import shlex
from typing import Any

EXIT_DONE = 0
EXIT_FAILED = 1
EXIT_REFUSED = 2
EXIT_NOT_FRESH = 3
EXIT_SUSPENDED = 4
EXIT_DIFFERENCES = 5


class HeadwaterError(Exception):
    """Base of all errors of this project. Pickles: errors cross process borders."""

    exit_status = EXIT_FAILED
    default_code = "failed"

    def __init__(self, message: str, *, code: str | None = None, where: str = "", remedy: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.code = code or self.default_code
        self.where = where
        self.remedy = remedy

    def __str__(self) -> str:
        text = f"{self.where}: {self.message}" if self.where else self.message
        return f"{text}. What to do: {self.remedy}" if self.remedy else text

    def __reduce__(self) -> tuple[Any, ...]:
        return _rebuild, (type(self), self.message, self.code, self.where, self.remedy)

    def to_json(self) -> dict[str, Any]:
        return {"error": {"code": self.code, "message": self.message, "where": self.where, "remedy": self.remedy}}


def _rebuild(kind: type[HeadwaterError], message: str, code: str, where: str, remedy: str) -> HeadwaterError:
    return kind(message, code=code, where=where, remedy=remedy)


class Refused(HeadwaterError):
    """Configuration or input that cannot work; nothing was changed."""

    exit_status = EXIT_REFUSED
    default_code = "refused"


class BadConfiguration(Refused):
    """The pipeline file. `message` lists every problem with its path in the file."""

    default_code = "bad_configuration"


class DamagedLake(Refused):
    """A file of the lake's control tables is damaged that others were built on."""

    default_code = "damaged_lake"

    def __init__(
        self, message: str, *, code: str | None = None, where: str = "the lake's control tables", remedy: str = ""
    ) -> None:
        again = "headwater load PIPELINE.yaml --again sets the damaged files aside and loads all tables again"
        super().__init__(message, code=code, where=where, remedy=remedy or again)


class SlotGap(Refused):
    """The slot cannot deliver what follows the ledger's last position."""

    default_code = "slot_gap"


class SourceChanged(Refused):
    """Another server, or another timeline, than the lake was built from."""

    default_code = "source_changed"


class Transient(HeadwaterError):
    """An outage or a lost race: the same command may succeed later."""

    default_code = "transient"


class SourceUnreachable(Transient):
    default_code = "source_unreachable"


class LostLease(Transient):
    """Another job holds what this one needs."""

    default_code = "lease_held"


class KeepsChanging(Transient):
    """Others committed to one table whenever we were about to: `where` names it."""

    default_code = "keeps_changing"

    @classmethod
    def during(cls, attempts: int, table: str) -> KeepsChanging:
        message = f"{table} changed under each of {attempts} attempts to commit"
        return cls(message, where=table, remedy="run it again")


class Fenced(HeadwaterError):
    """A newer generation has taken over; this driver must not publish anything more."""

    default_code = "fenced"


class TableError(HeadwaterError):
    """What suspends one table. `remedy` is a command that exists."""

    exit_status = EXIT_SUSPENDED
    default_code = "suspended"


class SchemaChanged(TableError):
    default_code = "schema_changed"


class BadValue(TableError):
    """A value that the lake's type cannot hold."""

    default_code = "bad_value"


class Diverged(TableError):
    default_code = "diverged"


class ForeignWrite(TableError):
    """Somebody else committed data to a lake table."""

    default_code = "foreign_write"


_TABLE_OPTION = re.compile(r"""(?<=--table )(?:[^\s"']|"(?:[^"]|"")*")+""")


def with_file(remedy: str, file: str) -> str:
    """`remedy` as it can be typed in a shell: with `file` for PIPELINE.yaml, and both this and the names of tables
    quoted, since a shell would take SQL's quotes away."""
    quoted = _TABLE_OPTION.sub(lambda name: shlex.quote(name[0]) if '"' in name[0] else name[0], remedy)
    return quoted.replace("PIPELINE.yaml", shlex.quote(file))
