"""A wait's look at what was validated: reads the table of validations, once a look and only what is new in it.

The judgement is `headwater.lake.validated`. No Spark, no Great Expectations.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headwater.delta import storage
from headwater.delta.delta_log import read_snapshot
from headwater.delta.log_entries import log_path
from headwater.delta.whole import is_whole
from headwater.lake.freshness import Verdict
from headwater.lake.look import Look
from headwater.lake.reader import LakeReader
from headwater.lake.validated import Judge, judged_by_validation
from headwater.lake.validations import ValidationReader


class ValidatedCuts:
    """What was validated in the lake under `root`, for one wait. `lake`: the wait's own reader."""

    def __init__(self, root: str, lake: LakeReader) -> None:
        self._reader, self.lake = ValidationReader(root), lake
        self._gone: set[int] = set()

    def judge(self, fresh: Verdict, look: Look, must: Sequence[str], judge: Judge) -> Verdict:
        """`fresh` as a verdict on what was validated of the tables `must`."""
        known = [found for found in self._reader.look() if found.epoch not in self._gone]
        registry = self.lake.registry()
        records = registry.tables if registry is not None else {}
        return judged_by_validation(fresh, look, must, known, records, judge, self.lake.epoch)

    def is_gone(self, cut: Mapping[str, Any]) -> bool:
        """Whether a version of `cut`, which is pinned by now, was cleaned up before; then its epoch is not offered
        again."""
        for table in cut["tables"].values():
            if table["version"] is not None and _is_gone(storage.path_of(table["path"]), table["version"]):
                self._gone.add(cut["epoch"])
                return True
        return False


def _is_gone(folder: str, version: int) -> bool:
    if not storage.is_folder(log_path(folder)):
        return False  # for the reader's own engine to say
    try:
        read_snapshot(folder, version)
    except FileNotFoundError:
        return True
    return not is_whole(folder, version)
