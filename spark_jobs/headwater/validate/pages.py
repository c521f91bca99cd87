"""Pages about a validation, for a browser: an overview of our own, and Great Expectations' data docs of each table.

`<folder>/index.html` lists the newest validation's tables; `<folder>/<validation>/` holds a page per table as Great
Expectations draws it. That one names styles and scripts on public servers: a policy at its head keeps browsers from
asking for them, since keys of rows stand beside them, and a few styles of our own take their place. Pages hold counts,
and keys of rows; no other values. The last thirty validations stay.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping, Sequence
from html import escape
from os.path import join

from headwater.delta import storage
from headwater.lake.cuts import time_text
from headwater.lake.paths import validation_pages_path
from headwater.lake.validations import Validation
from headwater.names import TableName
from headwater.position import format_lsn
from headwater.validate.expectations import ExpectationOutcome, clear_errors

log = logging.getLogger(__name__)

_KEPT = 30
_EXAMPLES = 3  # keys of rows that a headline names
_VIEWPORT = '<meta name="viewport" content="width=device-width, initial-scale=1">'
_STYLE = (
    "body{font:15px/1.5 system-ui,sans-serif;margin:2rem;color-scheme:light dark}table{border-collapse:collapse}"
    "td,th{text-align:left;padding:.3rem 1rem .3rem 0;vertical-align:top;border-bottom:1px solid #8886}"
    ".failed{color:#c22;font-weight:600}"
    "@media (max-width:480px){body{margin:1rem}td,th{padding:.3rem .5rem .3rem 0;overflow-wrap:anywhere}}"
)
_SEALED = (
    "<head><meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">"
    "<style>body{font:15px/1.5 system-ui,sans-serif;margin:2rem}table{border-collapse:collapse}"
    "td,th{text-align:left;padding:.3rem 1rem .3rem 0;vertical-align:top;border-bottom:1px solid #ccc}"
    "i.fas{font-style:normal}.fa-check-circle::before{content:'met';color:#181}"
    ".fa-times::before{content:'not met';color:#c22;font-weight:600}"
    ".fa-exclamation-triangle::before{content:'not judged';color:#c22;font-weight:600}"
    # What only scripts would fill or open.
    ".navbar,.card:has(.btn-group,nav),[data-toggle=collapse],footer,img{display:none}</style>"
)


def write_pages(
    root: str, folder: str | None, validation: Validation, outcomes: Mapping[str, Sequence[ExpectationOutcome]]
) -> str:
    """Write the pages of `validation` into `folder` (None: that of the lake); the address of the overview."""
    place = folder if folder is not None else validation_pages_path(root)
    below = f"{validation.finished_at:%Y%m%dT%H%M%SZ}-{validation.id[:8]}"
    storage.make_folder(join(place, below))
    for name, found in outcomes.items():
        storage.replace(join(place, below, _file(name)), _data_docs(name, validation, found).encode())
    overview = join(place, "index.html")
    storage.replace(overview, _overview(below, validation, outcomes).encode())
    runs = sorted(name for name in storage.names(place) if _is_run(name))
    for old in runs[:-_KEPT]:
        storage.delete_folder(join(place, old))
    return storage.uri_of(overview)


def _is_run(name: str) -> bool:
    """`20260301T000000Z-0123abcd`: never a folder that somebody else made in a given one."""
    return len(name) == 25 and name[8] == "T" and name[15:17] == "Z-"


def _file(table: str) -> str:
    return TableName.parse(table).path.replace("/", ".") + ".html"


def _data_docs(name: str, validation: Validation, outcomes: Sequence[ExpectationOutcome]) -> str:
    from great_expectations.core.expectation_validation_result import ExpectationSuiteValidationResult
    from great_expectations.render.renderer.page_renderer import ValidationResultsPageRenderer
    from great_expectations.render.view.view import DefaultJinjaPageView

    passed = sum(outcome.success for outcome in outcomes)
    result = ExpectationSuiteValidationResult(
        success=all(outcome.success for outcome in outcomes),
        results=[clear_errors(outcome) for outcome in outcomes],
        suite_name=name,
        statistics={
            "evaluated_expectations": len(outcomes),
            "successful_expectations": passed,
            "unsuccessful_expectations": len(outcomes) - passed,
            "success_percent": 100.0 * passed / len(outcomes) if outcomes else 100.0,
        },
        meta={
            "great_expectations_version": validation.gx_version,
            "run_id": {"run_name": f"epoch {validation.epoch}", "run_time": time_text(validation.finished_at)},
            "active_batch_definition": {"data_asset_name": name, "batch_identifiers": {"epoch": validation.epoch}},
        },
    )
    page = str(DefaultJinjaPageView().render(ValidationResultsPageRenderer().render(result)))  # type: ignore[no-untyped-call]
    page = page.replace("<head>", f"{_SEALED}{_VIEWPORT}", 1)
    return re.sub("<body[^>]*>", lambda found: f"{found[0]}{_headline(name, outcomes)}", page, count=1)


def _overview(below: str, validation: Validation, outcomes: Mapping[str, Sequence[ExpectationOutcome]]) -> str:
    rows = "".join(
        f'<tr><td><a href="{escape(below)}/{escape(_file(result.table))}">{escape(result.table)}</a></td>'
        f"<td{'' if result.success else ' class=failed'}>{'passed' if result.success else 'failed'}</td>"
        f"<td>{result.rows}</td><td>{_failures(outcomes[result.table])}</td></tr>"
        for result in validation.tables
    )
    failed = [result.table for result in validation.tables if not result.success]
    said = f"{len(failed)} of {len(validation.tables)} tables failed" if failed else "every table passed"
    headlines = "".join(_headline(table, outcomes[table]) for table in failed)
    name = escape(validation.pipeline)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8">{_VIEWPORT}<title>{name}: validation</title>'
        f"<style>{_STYLE}</style></head><body><h1>Validation of {name}: {said}</h1>{headlines}"
        f"<p>Epoch {validation.epoch} at {format_lsn(validation.position.lsn)}, {time_text(validation.finished_at)}, "
        f"Great Expectations {escape(validation.gx_version)}</p>"
        f"<table><tr><th>table</th><th>result</th><th>rows</th><th>not met</th></tr>{rows}</table></body></html>\n"
    )


def _headline(table: str, outcomes: Sequence[ExpectationOutcome]) -> str:
    """What failed, where, how many, and which rows for example: the first thing on a page."""
    failed = [outcome for outcome in outcomes if not outcome.success]
    if not failed:
        return f"<p>{escape(table)}: passed, {len(outcomes)} expectations.</p>"
    lines = "".join(f"<li>{escape(_told(outcome))}</li>" for outcome in failed)
    return f"<p class=failed>{escape(table)}: {len(failed)} of {len(outcomes)} expectations not met</p><ul>{lines}</ul>"


def _told(outcome: ExpectationOutcome) -> str:
    expectation = outcome.expectation
    columns = ", ".join(expectation.columns)
    told = f"{expectation.kind}{f' of {columns}' if columns else ''} ({expectation.severity})"
    if outcome.error is not None:
        return f"{told}: it could not be judged: {outcome.error}"
    if outcome.unexpected is not None:
        told += f": {outcome.unexpected} {'row' if outcome.unexpected == 1 else 'rows'}"
    keys = "; ".join(", ".join(f"{name} {value}" for name, value in key.items()) for key in outcome.keys[:_EXAMPLES])
    return f"{told}, for example {keys}" if keys else told


def _failures(outcomes: Sequence[ExpectationOutcome]) -> str:
    return "<br>".join(
        escape(
            f"{outcome.expectation.kind} {', '.join(outcome.expectation.columns)} ({outcome.expectation.severity})"
            + (f": {outcome.unexpected} rows" if outcome.unexpected is not None else "")
        )
        for outcome in outcomes
        if not outcome.success
    )
