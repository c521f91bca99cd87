"""Runs that are mapped from a file: what they hold of memory."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from headwater.delta.index.codes import Codes
from headwater.delta.index.runs import KeyRun, RunFile

ENTRIES = 200_000


def resident(run: KeyRun) -> int:
    """kB of the run's mapping that count as memory of this process."""
    address, here = int(run.place.__array_interface__["data"][0]), False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        head = line.split()[0]
        if "-" in head and not head.endswith(":"):
            low, high = (int(end, 16) for end in head.split("-"))
            here = low <= address < high
        elif here and head == "Rss:":
            return int(line.split()[1])
    raise AssertionError("it is not mapped")


def test_pages_of_a_mapped_run_are_let_go_after_a_look_up_of_many_keys_only() -> None:
    file = RunFile(None, ENTRIES, words=1)
    file.write(Codes(np.arange(ENTRIES, dtype=np.uint64), None), np.arange(ENTRIES, dtype=np.int64))
    run = file.finish()
    few, many = (Codes(np.arange(0, ENTRIES, step, dtype=np.uint64), None) for step in (1000, 2))
    assert run.look_up(few).tolist() == list(range(0, ENTRIES, 1000))
    assert resident(run) > 0
    assert run.look_up(many).tolist() == list(range(0, ENTRIES, 2))
    assert resident(run) == 0
