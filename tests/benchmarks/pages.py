"""docs/benchmarks.md and the pages behind it, as far as they are figures: made of what is kept.

A page is written by hand around places that are filled here:

    <!-- promises -->                            the table of promises
    <!-- figures: PROGRAM[, PROGRAM] [| PATTERN] -->     figures as a table; those whose name PATTERN is found in
    <!-- plot: NAME UNIT: PROGRAM[, PROGRAM] [| PATTERN] -->     the same that have this unit, as a picture NAME.svg

each up to `<!-- end -->`. `python tests/benchmarks/pages.py` fills them; tests/unit/test_figures.py says when they are
not what the kept figures make.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

from figures import KEPT, Figure, kept
from plot import picture
from promises import PROMISES, Promise

DOCS = Path(__file__).resolve().parents[2] / "docs"
FRONT = DOCS / "benchmarks.md"
BEHIND = DOCS / "benchmarks"
_PLACE = re.compile(r"<!-- (promises|figures|plot)(?:: (.*?))? -->\n.*?<!-- end -->", re.DOTALL)


def made() -> dict[Path, str]:
    """Every page and picture, as it is to be."""
    found: dict[Path, str] = {}
    for page in [FRONT, *sorted(BEHIND.glob("*.md"))]:

        def fill(place: re.Match[str]) -> str:
            kind, asked = place[1], place[2] or ""
            if kind == "promises":
                filled = "\n".join(promises())
            elif kind == "figures":
                filled = "\n".join(table(chosen(asked)))
            else:
                filled = plot(asked, found)
            head = f"{kind}: {asked}" if asked else kind
            return f"<!-- {head} -->\n\n{filled}\n\n<!-- end -->"

        found[page] = _PLACE.sub(fill, page.read_text(encoding="utf-8"))
    return found


def write() -> None:
    for path, text in made().items():
        path.write_text(text, encoding="utf-8")


def promises() -> Iterator[str]:
    yield "| promise | target | measured | reference |"
    yield "|---|---|---|---|"
    for promise in PROMISES:
        figure = _named(promise)
        measured = _value(figure.value, figure.unit)
        yield _row(
            f"[{promise.words}](benchmarks/{promise.page}.md)",
            promise.target(figure),
            measured if promise.kept(figure) else f"**{measured}**",
            _reference(figure),
        )


def table(figures: list[Figure]) -> Iterator[str]:
    yield "| figure | measured | reference | day, and what else the machine did |"
    yield "|---|---|---|---|"
    for figure in figures:
        day = figure.measured if figure.load == "nothing else" else f"{figure.measured}, {figure.load}"
        yield _row(figure.name, _value(figure.value, figure.unit), _reference(figure), day)


def plot(asked: str, found: dict[Path, str]) -> str:
    """The picture goes into `found`; what the page shows is a link to it."""
    head, _, which = asked.partition(": ")
    name, _, unit = head.partition(" ")
    figures = [one for one in chosen(which) if one.unit == unit and one.value > 0]
    title = f"Figures of this page in {unit}, each beside its reference; the table below has the numbers"
    found[BEHIND / f"{name}.svg"] = picture(title, figures)
    return f"![{title}]({name}.svg)"


def chosen(asked: str) -> list[Figure]:
    programs, _, pattern = asked.partition(" | ")
    figures = [one for program in programs.split(", ") for one in kept(program)]
    found = [one for one in figures if re.search(pattern, one.name)]
    if not found:
        raise ValueError(f"no figure is kept below {KEPT} for {asked!r}")
    return found


def _named(promise: Promise) -> Figure:
    for one in kept(promise.program):
        if one.name == promise.figure:
            return one
    raise ValueError(f"{KEPT / promise.program}.json has no figure {promise.figure!r}")


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


def _value(value: float, unit: str) -> str:
    space = "" if unit.startswith("%") else " "
    return f"{value:,}{space}{unit}"


def _reference(figure: Figure) -> str:
    if figure.reference_value is None:
        return "-"
    return f"{_value(figure.reference_value, figure.reference_unit)}: {figure.reference}"


if __name__ == "__main__":
    write()
