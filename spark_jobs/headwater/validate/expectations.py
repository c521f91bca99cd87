"""Great Expectations on DataFrames: the one module that knows it. Suites in, outcomes out.

A run has two passes. The first asks only whether each expectation holds, which Great Expectations answers with few
Spark jobs for all of them together; the second asks about those that do not, for numbers and for the keys of at most
twenty rows. No value of a row but its key leaves this module: Great Expectations is told to leave values out, and what
it says all the same (an observed text, a message that quotes a value) is dropped here.

It is told to send nothing to its makers, and keeps its state in memory.
"""

from __future__ import annotations

import logging
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

from headwater.errors import Refused
from headwater.validate.suites import Expectation, Suite, bad_suites

if TYPE_CHECKING:
    from pyspark.sql import DataFrame

SHOWN_KEYS = 20
_ROW_WISE = frozenset(
    {
        *(f"expect_column_value_lengths_to_{what}" for what in ("be_between", "equal")),
        *(
            f"expect_column_values_to_{what}"
            for what in (
                "be_between",
                "be_dateutil_parseable",
                "be_in_set",
                "be_json_parseable",
                "be_null",
                "match_json_schema",
                "match_like_pattern",
                "match_like_pattern_list",
                "match_regex",
                "match_regex_list",
                "match_strftime_format",
                "not_be_in_set",
                "not_be_null",
                "not_match_like_pattern",
                "not_match_like_pattern_list",
                "not_match_regex",
                "not_match_regex_list",
            )
        ),
        "expect_column_pair_values_a_to_be_greater_than_b",
        "expect_column_pair_values_to_be_equal",
        "expect_column_pair_values_to_be_in_set",
        "expect_multicolumn_sum_to_equal",
        "expect_multicolumn_values_to_be_equal",
        "expect_select_column_values_to_be_unique_within_record",
    }
)
"""Each row meets them or not, whatever the other rows are. Listed one by one: what is not here is asked of all rows,
and so are expectations of one's own."""
_LONGEST = 200
_GX_SEVERITY = {"error": "critical", "warning": "warning", "info": "info"}
_QUOTE = re.compile(r"['\"`\n]")
_SPARK_CONDITION = re.compile(r"\[([A-Z][A-Z0-9_.]+)\]")


@dataclass(frozen=True, slots=True)
class ExpectationOutcome:
    """How one expectation came out. `unexpected`: rows that do not meet it; `observed`: the number that it is about;
    `keys`: of the rows, at most twenty; `error`: why it could not be judged.

    `result`: Great Expectations' own, without values, for its pages.
    """

    suite: str
    expectation: Expectation
    success: bool
    unexpected: int | None = None
    observed: float | None = None
    keys: tuple[dict[str, Any], ...] = ()
    error: str | None = None
    result: Any = field(default=None, compare=False, repr=False)

    def to_json(self) -> dict[str, Any]:
        """For a failed one."""
        return {
            "suite": self.suite,
            "expectation": self.expectation.kind,
            "columns": list(self.expectation.columns),
            "severity": self.expectation.severity,
            "unexpected": self.unexpected,
            "observed": self.observed,
            "error": self.error,
        }


def require_great_expectations() -> str:
    """Its version; Refused when it is not installed. The first call imports it, which takes seconds."""
    # Before the import: its settings are read then.
    os.environ["GX_ANALYTICS_ENABLED"] = "false"
    try:
        import great_expectations
    except ImportError as error:
        raise Refused(
            f"Great Expectations is not installed here ({error})",
            code="no_great_expectations",
            where="headwater validate",
            remedy="pip install 'headwater[quality]' into the environment of the Spark driver",
        ) from None
    logging.getLogger("great_expectations").setLevel(logging.WARNING)
    return str(great_expectations.__version__)


def check_suites(suites: Mapping[str, Suite]) -> None:
    """BadSuite when Great Expectations does not know an expectation, or not its arguments."""
    require_great_expectations()
    problems = [
        f"{suite.place(index)}: {problem}"
        for suite in suites.values()
        for index, expectation in enumerate(suite.expectations)
        if (problem := _problem(expectation))
    ]
    if problems:
        raise bad_suites(problems)


def _problem(expectation: Expectation) -> str:
    from great_expectations.exceptions.exceptions import ExpectationNotFoundError
    from great_expectations.expectations.registry import get_expectation_impl

    try:
        get_expectation_impl(expectation.kind)
    except ExpectationNotFoundError:
        return f"Great Expectations knows no {expectation.kind}"
    try:
        _configured(expectation).to_domain_obj()
    except Exception as error:  # pydantic's of either version, and ValueErrors of expectations of one's own
        said = [f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in _faults(error)]
        return f"{expectation.kind}: {'; '.join(said) or str(error)}"
    return ""


def _faults(error: Exception) -> list[dict[str, Any]]:
    faults = getattr(error, "errors", None)
    return list(faults()) if callable(faults) else []


def _configured(expectation: Expectation) -> Any:
    from great_expectations.expectations.expectation_configuration import ExpectationConfiguration
    from great_expectations.expectations.metadata_types import FailureSeverity

    return ExpectationConfiguration(
        type=expectation.kind,
        kwargs=dict(expectation.arguments),
        meta=dict(expectation.meta),
        severity=FailureSeverity(_GX_SEVERITY[expectation.severity]),
    )


def is_row_wise(expectation: Expectation) -> bool:
    """Whether each row meets it or not whatever the other rows are, and all must: then unchanged rows need no second
    look."""
    return expectation.kind in _ROW_WISE and expectation.arguments.get("mostly", 1) == 1


def run(frame: DataFrame, name: str, suites: Sequence[Suite], key: Sequence[str]) -> list[ExpectationOutcome]:
    """The outcome of every expectation of `suites` on the rows of `frame`, in their order."""
    asked = [(suite.name, expectation) for suite in suites for expectation in suite.expectations]
    batch = _batch(frame, name)
    outcomes = [
        _outcome(suite, expectation, result, key)
        for (suite, expectation), result in zip(
            asked, _validate(batch, [e for _, e in asked], {"result_format": "BOOLEAN_ONLY"}), strict=True
        )
    ]
    failed = [index for index, outcome in enumerate(outcomes) if not outcome.success and outcome.error is None]
    more: dict[str, Any] = {"result_format": "SUMMARY", "partial_unexpected_count": SHOWN_KEYS}
    if key:
        more |= {"unexpected_index_column_names": list(key), "exclude_unexpected_values": True}
    for index, result in zip(failed, _validate(batch, [asked[i][1] for i in failed], more), strict=True):
        told = _outcome(*asked[index], result, key)
        # The verdict is the first pass's, whatever the second one could tell.
        outcomes[index] = replace(told, success=False)
    return outcomes


def _batch(frame: DataFrame, name: str) -> Any:
    import great_expectations
    from great_expectations.data_context.types.base import (
        DataContextConfig,
        InMemoryStoreBackendDefaults,
        ProgressBarsConfig,
    )

    context = great_expectations.get_context(
        mode="ephemeral",
        project_config=DataContextConfig(
            analytics_enabled=False,
            progress_bars=ProgressBarsConfig(globally=False, metric_calculations=False),
            store_backend_defaults=InMemoryStoreBackendDefaults(),
        ),
    )
    source = context.data_sources.add_spark("lake", persist=False)
    asset = source.add_dataframe_asset(name)
    return asset.add_batch_definition_whole_dataframe("cut").get_batch({"dataframe": frame})


def _validate(batch: Any, expectations: Sequence[Expectation], result_format: dict[str, Any]) -> list[Any]:
    """Great Expectations' results in the order of `expectations`."""
    from great_expectations import ExpectationSuite

    if not expectations:
        return []
    # It gives results in an order of its own: each carries its number.
    configured = [_configured(expectation) for expectation in expectations]
    for number, one in enumerate(configured):
        one.meta = {**one.meta, "headwater_number": number}
    suite = ExpectationSuite(name="cut", expectations=[one.to_domain_obj() for one in configured])
    found = batch.validate(suite, result_format=result_format)
    by_number = {result.expectation_config.meta.pop("headwater_number"): result for result in found.results}
    return [by_number[number] for number in range(len(expectations))]


def _outcome(suite: str, expectation: Expectation, result: Any, key: Sequence[str]) -> ExpectationOutcome:
    told: dict[str, Any] = dict(result.result or {})
    observed = told.get("observed_value")
    number = isinstance(observed, int | float) and not isinstance(observed, bool)
    for name in [n for n in told if "unexpected_list" in n or "counts" in n or n in ("details", "unexpected_rows")]:
        del told[name]
    if "observed_value" in told and not number and not expectation.kind.endswith("_of_type"):
        del told["observed_value"]
    keys = _keys(told.pop("partial_unexpected_index_list", None), key)
    told.pop("unexpected_index_query", None)
    if keys:
        told["partial_unexpected_index_list"] = list(keys)
    result.result = told
    return ExpectationOutcome(
        suite,
        expectation,
        bool(result.success),
        unexpected=told.get("unexpected_count"),
        # Of infinities the mean is one, or NaN: JSON has neither.
        observed=float(observed) if number and observed is not None and math.isfinite(observed) else None,
        keys=keys,
        error=_error(result),
        result=result,
    )


def _keys(listed: Any, key: Sequence[str]) -> tuple[dict[str, Any], ...]:
    """Keys of rows, from what Great Expectations lists: a mapping per row, or one mapping of lists."""
    rows: list[Mapping[str, Any]] = []
    for entry in listed or ():
        if key and all(isinstance(entry.get(name), list) for name in key):
            rows += [dict(zip(key, values, strict=True)) for values in zip(*(entry[n] for n in key), strict=True)]
        else:
            rows.append(entry)
    shown = [{name: _shown(row[name]) for name in key} for row in rows if all(name in row for name in key)]
    different = {str(one): one for one in shown} if key else {}
    return tuple(list(different.values())[:SHOWN_KEYS])


def _shown(value: Any) -> Any:
    """Numbers and booleans as they are, everything else as text."""
    return value if value is None or isinstance(value, bool | int) else str(value)


def _error(result: Any) -> str | None:
    """Why it could not be judged: of Spark's message its class, of any other what stands before the first quote, since
    behind it there may be a value."""
    told = result.exception_info or {}
    infos = [told] if "raised_exception" in told else list(told.values())
    raised = [info for info in infos if info.get("raised_exception")]
    if not raised:
        return None
    message = str(raised[0].get("exception_message") or "").strip()
    if (condition := _SPARK_CONDITION.search(message)) is not None:
        return f"Spark refuses it: {condition[1]}"
    return _QUOTE.split(message, maxsplit=1)[0].strip(" :([")[:_LONGEST] or "it could not be judged"


def clear_errors(outcome: ExpectationOutcome) -> Any:
    """Great Expectations' result of `outcome` for a page: the error in our words, no traceback."""
    outcome.result.exception_info = {
        "raised_exception": outcome.error is not None,
        "exception_message": outcome.error,
        "exception_traceback": None,
    }
    return outcome.result


__all__ = [
    "SHOWN_KEYS",
    "ExpectationOutcome",
    "check_suites",
    "clear_errors",
    "is_row_wise",
    "require_great_expectations",
    "run",
]
