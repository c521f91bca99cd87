"""In which form the log sends values: `binary` holds for the whole connection, so one column decides for all.

Decided when replicate starts, from the registry, since rows are decoded by what it holds; it stays over reconnects. A
table that a load adds just before the slot is taken, and a column that comes while a driver runs, are noticed here.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping

from headwater.errors import Transient
from headwater.lake.registry import TableRecord
from headwater.names import quote_ident

log = logging.getLogger(__name__)


def text_columns(tables: Mapping[str, TableRecord]) -> list[str]:
    """The columns whose values the log must send as text, because their types' binary form is not known here."""
    return [
        f"{name}.{quote_ident(column.name)}"
        for name, record in tables.items()
        if record.schemas and record.state != "removed"
        for column in record.schema.needs_text
    ]


def may_be_binary(tables: Mapping[str, TableRecord]) -> bool:
    """Whether the log may send binary values; if not, a warning names the columns that are the reason."""
    because = text_columns(tables)
    if because:
        log.warning(
            "the log connection uses the text format, which costs the source and the reader more: the binary form of "
            "these columns' types is not known: %s",
            ", ".join(because),
        )
    return not because


def refuse_late_text(tables: Mapping[str, TableRecord], *, binary: bool) -> None:
    """Transient when the connection was made with `binary` and a table or a column has come that needs text."""
    because = text_columns(tables)
    if binary and because:
        raise Transient(
            f"the log must now send text because of {', '.join(because)}, new since this run began",
            where="log connection",
            remedy="run replicate again",
        )
