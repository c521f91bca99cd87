"""A figure: the one form in which every benchmark prints what it has measured, and in which it is kept.

A program calls `figure` with a name in plain words that says the size as well (the same program at another size makes
other figures), a value with its unit, and what the same run measured as its reference. It is printed as one line of
JSON. `run.py` keeps such lines below `kept/`, a file for each program; `pages.py` makes docs/benchmarks.md of them.
"""

from __future__ import annotations

import json
import os
import platform
import subprocess
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from functools import cache
from pathlib import Path

KEPT = Path(__file__).parent / "kept"


@dataclass(frozen=True)
class Figure:
    name: str
    value: float
    unit: str
    reference: str  # what it is compared with, in words; empty: with nothing
    reference_value: float | None
    reference_unit: str
    measured: str  # the day
    load: str  # what else the machine did: its load average before the program began, or words
    machine: str
    commit: str
    source: str = ""  # where it was taken over from, if no program printed it in this form

    def line(self) -> str:
        return json.dumps({key: value for key, value in asdict(self).items() if key != "source" or value})


def figure(
    name: str, value: float | None, unit: str, reference: str = "", against: float | None = None, of: str = ""
) -> None:
    """Print one. `against` is the value of `reference`, in the same unit unless `of` is another; no value, no figure:
    a run that was too short for it says nothing."""
    if value is None:
        return
    other = None if against is None else rounded(against)
    unit_of_other = (of or unit) if reference else ""
    found = Figure(name, rounded(value), unit, reference, other, unit_of_other, _today(), LOAD, _machine(), _commit())
    print(found.line(), flush=True)


def rounded(value: float) -> float:
    """To three digits that count; whole numbers have no point."""
    short = float(f"{value:.3g}")
    return int(short) if short.is_integer() else short


def kept(program: str, folder: Path = KEPT) -> list[Figure]:
    file = folder / f"{program}.json"
    return [Figure(**one) for one in json.loads(file.read_text(encoding="utf-8"))] if file.exists() else []


def keep(program: str, printed: list[Figure], folder: Path = KEPT) -> None:
    """A figure takes the place of the one with its name; what was not measured again stays, with its day."""
    found = {one.name: one for one in kept(program, folder)} | {one.name: one for one in printed}
    lines = ",\n".join(one.line() for one in found.values())
    (folder / f"{program}.json").write_text(f"[\n{lines}\n]\n", encoding="utf-8")


def parsed(line: str) -> Figure | None:
    """The figure that a program printed as `line`; other lines are none."""
    if not line.startswith('{"name": '):
        return None
    return Figure(**json.loads(line))


def _today() -> str:
    return datetime.now(UTC).date().isoformat()


LOAD = f"load average {os.getloadavg()[0]:.0f}"  # before the program itself is a part of it


@cache
def _machine() -> str:
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") >> 30
    return (
        f"{len(os.sched_getaffinity(0))} cores, {memory} GiB, {platform.system()}, Python {platform.python_version()}"
    )


@cache
def _commit() -> str:
    """The newest commit; with a plus where files differ from it."""
    done = subprocess.run(
        ["git", "describe", "--always", "--exclude=*", "--dirty=+"],
        cwd=KEPT.parent,
        capture_output=True,
        text=True,
        check=False,
    )
    return done.stdout.strip()
