"""Comparing source and lake in this process, where both are small: starting Spark would take longer than the work.

It says what `headwater.verify.by_spark` says of the same rows, but for the form in which a float that is a key is shown
(1e+16 here, 1.0E16 there). Rows that are the same in every bit have the same number
(`headwater.log.net.codes`), so a first look rests on no digests; from look to look a row is known by the SHA-256 of its
values.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from datetime import date, datetime
from decimal import Decimal
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from headwater.arrow_types import lake_schema
from headwater.load.rows_by_key import ORIGIN
from headwater.log.net.codes import key_codes
from headwater.schema import TableSchema
from headwater.verify.candidates import INDEX, SHOWN_CHARACTERS, Candidates, is_multiset, shown_columns
from headwater.verify.settle import LakeRow, SourceRow, State
from headwater.verify.sides import Sides

Int64 = npt.NDArray[np.int64]

_NOBODY: Final = -1


class MemoryComparison:
    """Source against lake for one table; rows are tables with the columns of `lake_schema`."""

    def __init__(self, schema: TableSchema) -> None:
        self._key, self._shown = list(schema.key), shown_columns(schema)
        self._columns = lake_schema(schema).names
        self.multiset = is_multiset(schema)

    def first_look(self, sides: Sides, limit: int) -> tuple[int, Candidates]:
        source = sides.source_here()
        lake = pa.concat_tables([source.slice(0, 0), *(rows for _, rows in sides.lake_here())])
        return source.num_rows, self.compare(source, lake, limit)

    def compare(self, source: pa.Table, lake: pa.Table, limit: int) -> Candidates:
        """The keys that differ between these rows, `limit` of them with their values."""
        rows, balance = _balance(_exact(source), _exact(lake))
        differs = np.flatnonzero(balance[rows])
        codes = rows
        if not self.multiset:
            codes, balance = _balance(source.select(self._key), lake.select(self._key))
        differing, at = np.unique(codes[differs], return_index=True)
        # Any row of a key stands for it.
        some = pa.concat_tables([source, lake]).take(pa.array(differs[at], pa.int64()))
        keys = [pa.array(_digests(some), pa.string())] if self.multiset else some.select(self._key).columns
        texts = [_texts(some[name]) for name in self._shown]
        if self.multiset:
            texts = [[text and text[:SHOWN_CHARACTERS] for text in column] for column in texts]
        found = {
            **{f"k{index}": column for index, column in enumerate(keys)},
            "n": pa.array(balance[differing], pa.int64()),
            **{f"x{index}": pa.array(column, pa.string()) for index, column in enumerate(texts)},
        }
        return _candidates(pa.table(found), self._shown, limit)

    def look_again(self, sides: Sides, candidates: Candidates, numbers: Sequence[int]) -> dict[int, State]:
        found: dict[int, _Rows] = defaultdict(_Rows)
        if self.multiset:
            for number, _ in self._chosen(sides.source_here(), candidates, numbers):
                found[number].source.append(("", 0))
        else:
            for part, rows in sides.under(candidates, numbers):
                origins = rows[ORIGIN].to_pylist()
                for number, at, digest in self._with_digest(rows.select(self._columns), candidates, part):
                    found[number].source.append((digest, origins[at]))
        for file, rows in sides.lake_here():
            if self.multiset:
                for number, _ in self._chosen(rows, candidates, numbers):
                    found[number].lake.append(("", ""))
            else:
                for number, _, digest in self._with_digest(rows, candidates, numbers):
                    found[number].lake.append((digest, file))
        return {number: rows.state for number, rows in found.items()}

    def source_rows(self, sides: Sides, candidates: Candidates, numbers: Sequence[int]) -> pa.Table:
        source = sides.source_here()
        at = dict(self._chosen(source, candidates, numbers))
        return source.take(pa.array(at.values(), pa.int64())).append_column(INDEX, pa.array(at.keys(), pa.int64()))

    def _with_digest(
        self, rows: pa.Table, candidates: Candidates, numbers: Sequence[int]
    ) -> Iterator[tuple[int, int, str]]:
        chosen = list(self._chosen(rows, candidates, numbers))
        digests = _digests(rows.take(pa.array([at for _, at in chosen], pa.int64())))
        return ((number, at, digest) for (number, at), digest in zip(chosen, digests, strict=True))

    def _chosen(self, rows: pa.Table, candidates: Candidates, numbers: Sequence[int]) -> Iterator[tuple[int, int]]:
        """The rows that are of the keys `numbers`: the key's number, and the row's."""
        wanted = candidates.typed(numbers)
        if self.multiset:
            number_of = dict(zip(wanted["k0"].to_pylist(), numbers, strict=True))
            numbered = ((number_of.get(digest), at) for at, digest in enumerate(_digests(rows)))
            return ((number, at) for number, at in numbered if number is not None)
        of_rows, of_keys, above = key_codes(rows.select(self._key), wanted.rename_columns(self._key))
        known = np.full(above, _NOBODY, dtype=np.int64)
        known[of_keys] = np.asarray(numbers, dtype=np.int64)
        at = np.flatnonzero(known[of_rows] != _NOBODY)
        return zip(known[of_rows[at]].tolist(), at.tolist(), strict=True)


@dataclass(slots=True)
class _Rows:
    """Of one key: digest and origin of each row at the source, digest and file of each in the lake."""

    source: list[tuple[str, int]] = field(default_factory=list)
    lake: list[tuple[str, str]] = field(default_factory=list)

    @property
    def state(self) -> State:
        source = SourceRow(len(self.source), *map(max, zip(*self.source, strict=True))) if self.source else SourceRow()
        if not self.lake:
            return State(source)
        digests, files = zip(*self.lake, strict=True)
        return State(source, LakeRow(len(self.lake), min(digests), max(digests), min(files)))


def _balance(source: pa.Table, lake: pa.Table) -> tuple[Int64, Int64]:
    """Each row's number, those of the source first: the same of the same rows. And of each number how many more rows
    the source has than the lake."""
    of_source, of_lake, above = key_codes(source, lake)
    balance = np.bincount(of_source, minlength=above) - np.bincount(of_lake, minlength=above)
    return np.concatenate([of_source, of_lake]), balance


def _candidates(keys: pa.Table, shown: tuple[str, ...], limit: int) -> Candidates:
    n = keys["n"].to_numpy()
    order = [name for name in keys.column_names if name.startswith("k")]
    # Arrow puts no lists in order; their texts will do.
    by = [
        (name.replace("k", "x") if pa.types.is_list(keys[name].type) else name, "ascending", "at_start")
        for name in order
    ]
    first = pc.sort_indices(keys, sort_keys=by)[:limit]
    kinds = (int(np.maximum(n, 0).sum()), int(np.maximum(-n, 0).sum()), int((n == 0).sum()))
    return Candidates(keys.take(first), shown, max(0, keys.num_rows - limit), *kinds)


def _exact(rows: pa.Table) -> pa.Table:
    """Values of which those that are the same in every bit, and no others, are equal, of types that Arrow numbers."""
    return pa.table([_exact_column(rows[name]) for name in rows.column_names], names=rows.column_names)


def _exact_column(column: pa.ChunkedArray) -> pa.ChunkedArray:
    kind = column.type
    if pa.types.is_floating(kind):
        bits = pa.int32() if kind == pa.float32() else pa.int64()
        one_nan = pc.if_else(pc.is_nan(column), pa.scalar(math.nan, kind), column)
        return pa.chunked_array([chunk.view(bits) for chunk in one_nan.chunks], bits)
    if pa.types.is_list(kind):
        written = [None if one is None else repr(one).encode() for one in column.to_pylist()]
        return pa.chunked_array([pa.array(written, pa.binary())])
    return column


def _digests(rows: pa.Table) -> list[str]:
    """Of each row; the same in any process."""
    columns = [_exact_column(column).to_pylist() for column in rows.columns]
    return [hashlib.sha256(repr(row).encode()).hexdigest() for row in zip(*columns, strict=True)]


def _texts(column: pa.ChunkedArray) -> list[str | None]:
    """As PostgreSQL reads them, and people; of a list the JSON of its elements' texts."""
    kind = column.type
    is_short = kind == pa.float32() or (pa.types.is_list(kind) and kind.value_type == pa.float32())
    return [None if value is None else _text(value, is_short) for value in column.to_pylist()]


def _text(value: Any, is_short: bool) -> str:
    """`is_short`: of a float of four bytes, or a list of such."""
    match value:
        case bool():
            return "true" if value else "false"
        case float() if math.isnan(value):
            return "NaN"
        case float() if math.isinf(value):
            return "Infinity" if value > 0 else "-Infinity"
        case float():
            return str(np.float32(value)) if is_short else repr(value)
        case Decimal():
            return format(value, "f")
        case bytes():
            return f"\\x{value.hex().upper()}"
        case datetime():
            text = value.replace(tzinfo=None).isoformat(sep=" ")
            return text.rstrip("0") if "." in text else text
        case date():
            return value.isoformat()
        case list():
            texts = [None if element is None else _text(element, is_short) for element in value]
            return json.dumps(texts, ensure_ascii=False, separators=(",", ":"))
    return str(value)
