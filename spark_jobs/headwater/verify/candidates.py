"""Keys that differ at a first look: what is said of them, and by what they are found again."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from headwater.schema import TableSchema

INDEX: Final = "_hw_i"
"""A column: the number of a key among the candidates."""
SHOWN_CHARACTERS: Final = 60
"""Of each value of a row that has no key."""
_SHOWN_COLUMNS: Final = 12


@dataclass(frozen=True, slots=True)
class Candidates:
    """Keys that differ at a first look. `keys`: one row each: `k…` the key as typed in the lake, `x…` its text, `n` how
    many rows the source has under it less those of the lake.

    `names`: what the text columns show. `more`: how many further keys differ that are not among them. `missing`,
    `extra`, `different`: rows, of all keys that differ.
    """

    keys: pa.Table
    names: tuple[str, ...]
    more: int = 0
    missing: int = 0
    extra: int = 0
    different: int = 0

    @property
    def surplus(self) -> npt.NDArray[np.int64]:
        """Of each key, the rows that the lake has too many; negative: too few."""
        found: npt.NDArray[np.int64] = -self.keys["n"].to_numpy()
        return found

    def kind(self, number: int) -> str:
        """What a first look says of key `number`, in the interface's words."""
        surplus = self.surplus[number]
        return "missing" if surplus < 0 else "extra" if surplus else "different"

    def shown(self, number: int) -> dict[str, Any]:
        """Key `number` for people and programs: numbers and booleans as they are, everything else as text."""
        row = self.keys.slice(number, 1).to_pylist()[0]
        found = {}
        for index, name in enumerate(self.names):
            typed = row.get(f"k{index}") if len(self.key_columns) == len(self.names) else None
            found[name] = typed if isinstance(typed, bool | int) else row[f"x{index}"]
        return found

    @property
    def key_columns(self) -> list[str]:
        return [name for name in self.keys.column_names if name.startswith("k")]

    def typed(self, numbers: Iterable[int]) -> pa.Table:
        """The keys `numbers`, in this order, as they are typed in the lake."""
        return self.keys.select(self.key_columns).take(pa.array(numbers, pa.int64()))

    def texts(self, numbers: Iterable[int]) -> list[tuple[str | None, ...]]:
        columns = [self.keys[f"x{index}"] for index in range(len(self.names))]
        return [tuple(column[number].as_py() for column in columns) for number in numbers]


def is_multiset(schema: TableSchema) -> bool:
    """Whether the rows of both sides are compared as a multiset: no key tells which two belong together."""
    return schema.insert_only or not schema.key


def shown_columns(schema: TableSchema) -> tuple[str, ...]:
    """What is shown of a row that differs."""
    return schema.key or tuple(column.name for column in schema.columns)[:_SHOWN_COLUMNS]
