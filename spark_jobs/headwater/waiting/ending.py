"""What a wait leaves behind: the cut that it hands out, pinned, and its line in the log of waits."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import TYPE_CHECKING

from headwater.lake.cuts import Cut, Pin, pin_cut, take_cut, time_text, with_parts
from headwater.lake.freshness import Outcome, Verdict
from headwater.lake.look import Look
from headwater.lake.wait_log import Waited, record
from headwater.pipeline_file.pipeline import Pipeline
from headwater.waiting.request import WaitRequest, deadline_in
from headwater.waiting.result import WaitResult
from headwater.waiting.target import WaitTarget

if TYPE_CHECKING:
    from headwater.lake.ledger import Epoch

_NO_END = frozenset({Outcome.FUTURE_POSITION, Outcome.NOT_REPLICATED, Outcome.TIMELINE_CHANGED})
"""Outcomes of questions that were wrong: nobody waited."""


def pinned_cut(
    pipeline: Pipeline, request: WaitRequest, wanted: WaitTarget, judged: Verdict, look: Look, epoch: Epoch
) -> tuple[Cut, Pin]:
    """The cut at `epoch`, which satisfies by the verdict `judged` on `look`."""
    assert wanted.tables is not None
    root = pipeline.lake_path()
    cut = take_cut(root, pipeline.name, look, epoch, wanted.tables, judged.lsn)
    if parts := wanted.partitions(newest=look.file is not None and epoch.epoch == look.file.epoch):
        cut = with_parts(cut, parts)
    return cut, pin_cut(root, cut, request.owner, deadline_in(request.keep))


def record_end(pipeline: Pipeline, request: WaitRequest, wanted: WaitTarget, result: WaitResult) -> None:
    if not request.who or result.outcome in _NO_END:
        return
    at, seconds = time_text(datetime.now(UTC)), round(result.waited_seconds, 3)
    asked = request.who, request.called, wanted.tables or ()
    record(pipeline.lake_path(), Waited(at, *asked, str(result.outcome), seconds))
