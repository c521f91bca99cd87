"""What a wait ends as, with a command that can be typed."""

from __future__ import annotations

import shlex
from types import SimpleNamespace
from typing import Any

from headwater.lake.freshness import Outcome, Verdict
from headwater.lake.look import Look
from headwater.waiting.judgement import Judgement


def test_the_remedy_at_the_deadline_names_the_pipeline_file_as_a_shell_needs_it() -> None:
    target = SimpleNamespace(max_staleness=None, by_table={}, open=False, now=False)
    pipeline: Any = SimpleNamespace(file="/my files/shop.yaml")
    parts: list[Any] = [None, SimpleNamespace(target=target), SimpleNamespace(source=None), None]
    judged = Judgement(pipeline, *parts).at_deadline(Verdict(None, "behind"), Look(None, {}), driver_seen=False)
    assert judged.outcome is Outcome.NOT_RUNNING
    assert shlex.split(judged.remedy) == ["headwater", "replicate", "/my files/shop.yaml"]
