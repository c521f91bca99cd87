"""What Great Expectations says, made into what may be told: keys and counts, and no value of a row."""

from __future__ import annotations

import json
import math
from types import SimpleNamespace
from typing import Any

import pytest

from headwater.validate.expectations import _outcome
from headwater.validate.suites import Expectation

SECRET = "it's a secret"


def outcome(key: tuple[str, ...] = ("id",), error: str | None = None, **result: Any) -> Any:
    info = {"raised_exception": error is not None, "exception_message": error}
    said = SimpleNamespace(result=result, success=False, exception_info=info if error is None else {"metric": info})
    return _outcome("rules", Expectation("expect_x", {"column": "note"}), said, key)


def test_of_a_row_only_its_key_is_told() -> None:
    found = outcome(
        unexpected_count=2,
        partial_unexpected_list=[SECRET],
        partial_unexpected_counts=[{"value": SECRET, "count": 1}],
        partial_unexpected_index_list=[{"id": 7, "note": SECRET}, {"id": 8, "note": SECRET}],
        unexpected_index_query=f"note = '{SECRET}'",
        observed_value=[SECRET],
        details={"value_counts": {SECRET: 1}},
    )
    assert (found.unexpected, found.keys, found.observed) == (2, ({"id": 7}, {"id": 8}), None)
    assert SECRET not in f"{found.to_json()} {found.result.result}"


def test_keys_come_row_by_row_or_column_by_column_each_once_and_twenty_at_most() -> None:
    listed = [{"a": [1, 1, 2], "b": ["x", "x", "y"]}]
    assert outcome(("a", "b"), partial_unexpected_index_list=listed).keys == ({"a": 1, "b": "x"}, {"a": 2, "b": "y"})
    many = [{"id": number, "note": SECRET} for number in range(50)]
    assert len(outcome(partial_unexpected_index_list=many).keys) == 20
    assert outcome((), partial_unexpected_index_list=many).keys == ()


def test_a_number_of_the_whole_is_told_and_a_text_is_not() -> None:
    assert outcome(observed_value=1.5).observed == 1.5
    assert outcome(observed_value=SECRET).observed is None


@pytest.mark.parametrize("number", [math.inf, -math.inf, math.nan])
def test_a_number_that_json_cannot_hold_is_not_told(number: float) -> None:
    assert json.loads(json.dumps(outcome(observed_value=number).to_json(), allow_nan=False))["observed"] is None


@pytest.mark.parametrize(
    ("message", "told"),
    [
        (f"[CAST_INVALID_INPUT] The value '{SECRET}' of the type \"STRING\"", "Spark refuses it: CAST_INVALID_INPUT"),
        (f"could not convert string to float: '{SECRET}'", "could not convert string to float"),
        (f'Error: the value "{SECRET}" is odd', "Error: the value"),
        ("", "it could not be judged"),
    ],
)
def test_what_could_not_be_judged_is_told_without_what_is_quoted(message: str, told: str) -> None:
    found = outcome(error=message)
    assert found.error == told
    assert "secret" not in str(found.to_json())
