"""Keys get the same number exactly if PostgreSQL holds them for equal."""

from __future__ import annotations

from typing import Any

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headwater.log.net.codes import key_codes

_FEW = st.sampled_from
_VALUES: dict[Any, st.SearchStrategy[Any]] = {
    pa.int16(): _FEW([-(2**15), -1, 0, 1, 2, 2**15 - 1]),
    pa.int64(): _FEW([-(2**63), 0, 1, 2, 3, 2**63 - 1]) | st.integers(0, 9),
    pa.float64(): _FEW([0.0, -0.0, 1.5, -1.5, float("nan"), float("inf")]),
    pa.string(): _FEW(["", "a", "b", "ab", "ü" * 20]),
    pa.date32(): _FEW([0, 1, 2]),
    pa.decimal128(9, 2): st.decimals(min_value=0, max_value=1, places=2),
}


def _in_chunks(values: list[Any], kind: Any, cut: int) -> pa.ChunkedArray:
    return pa.chunked_array([pa.array(values[:cut], kind), pa.array(values[cut:], kind)])


@settings(deadline=None)
@given(st.lists(st.sampled_from(list(_VALUES)), min_size=1, max_size=3), st.data())
def test_keys_have_the_same_code_exactly_if_they_are_equal(kinds: list[Any], data: st.DataObject) -> None:
    keys = data.draw(st.lists(st.tuples(*(_VALUES[kind] for kind in kinds)), max_size=20))
    border, cut = data.draw(st.integers(0, len(keys))), data.draw(st.integers(0, len(keys)))
    tables = []
    for part in (keys[:border], keys[border:]):
        columns = [_in_chunks([key[at] for key in part], kind, cut) for at, kind in enumerate(kinds)]
        tables.append(pa.table(columns, names=[f"k{at}" for at in range(len(kinds))]))
    new, old, above = key_codes(*tables)
    assert (len(new), len(old)) == (border, len(keys) - border)
    codes = [*new.tolist(), *old.tolist()]
    assert all(0 <= code < above for code in codes)
    # NaN equals NaN in PostgreSQL, and -0 equals 0, as in Python.
    compared = [tuple("nan" if value != value else value for value in key) for key in keys]
    for one, code in zip(compared, codes, strict=True):
        assert [code == other for other in codes] == [one == other for other in compared]


@pytest.mark.parametrize("step", [1, 2, 1000, 2**40])
def test_integers_close_together_and_far_apart_are_told_apart(step: int) -> None:
    keys = pa.table({"id": [5 + step * n for n in range(1000)]})
    new, old, above = key_codes(keys, keys.slice(990))
    assert len(np.unique(new)) == 1000
    assert old.tolist() == new[990:].tolist()
    assert above <= 2 * 1010
