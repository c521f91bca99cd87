"""`make bench`: every program of this folder that measures, or those that are named, one after the other. What they
print is shown, and their figures are kept below `kept/`; the pages are made anew after each, so that a run that is
ended early leaves nothing half done. A program runs at the size that it says at its top unless the environment has
another: a figure's name tells the size, so one of a small run takes no other's place. What no program prints any
more is taken out of its file by hand, `pages.py` makes the pages without it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pages
from figures import Figure, keep, parsed

HERE = Path(__file__).parent
PREFIXES = ("apply_", "bench_", "decode", "freshness_", "latency_", "load_", "log_", "page_", "reload_", "verify_")


def programs() -> list[str]:
    return sorted(file.stem for file in HERE.glob("*.py") if file.stem.startswith(PREFIXES))


def run(program: str) -> list[Figure]:
    print(f"== {program}", flush=True)
    found = []
    with subprocess.Popen([sys.executable, HERE / f"{program}.py"], stdout=subprocess.PIPE, text=True) as running:
        for line in running.stdout or ():
            print(line, end="", flush=True)
            if (one := parsed(line)) is not None:
                found.append(one)
    if running.returncode:
        raise SystemExit(f"{program} ended with {running.returncode}: none of its figures is kept")
    return found


def main() -> None:
    for program in sys.argv[1:] or programs():
        keep(program, run(program))
        pages.write()


if __name__ == "__main__":
    main()
