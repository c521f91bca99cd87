"""The pages of figures are what the kept figures make, and every program prints figures in the one form."""

from __future__ import annotations

import ast
import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).resolve().parents[2]
BENCHMARKS = ROOT / "tests" / "benchmarks"


@pytest.fixture(scope="module")
def benchmarks() -> Iterator[dict[str, ModuleType]]:
    """The programs stand beside each other and are no package."""
    sys.path.insert(0, str(BENCHMARKS))
    names = ("figures", "pages", "plot", "promises", "run")
    try:
        yield {name: importlib.import_module(name) for name in names}
    finally:
        sys.path.remove(str(BENCHMARKS))
        for name in names:
            sys.modules.pop(name, None)


def test_the_pages_and_pictures_are_what_the_kept_figures_make(benchmarks: dict[str, ModuleType]) -> None:
    made = benchmarks["pages"].made()
    stale = [str(path.relative_to(ROOT)) for path, text in made.items() if path.read_text(encoding="utf-8") != text]
    assert not stale, "run .venv/bin/python tests/benchmarks/pages.py"
    pictures = {path for path in made if path.suffix == ".svg"}
    assert pictures == set((ROOT / "docs" / "benchmarks").glob("*.svg"))


def test_every_kept_figure_is_on_a_page(benchmarks: dict[str, ModuleType]) -> None:
    text = "".join(page.read_text(encoding="utf-8") for page in (ROOT / "docs" / "benchmarks").glob("*.md"))
    kept = benchmarks["figures"].kept
    names = [one.name for file in (BENCHMARKS / "kept").glob("*.json") for one in kept(file.stem)]
    assert names
    assert [name for name in names if f"| {name} |" not in text] == []


def test_a_kept_figure_says_when_it_was_measured_and_by_what(benchmarks: dict[str, ModuleType]) -> None:
    programs = set(benchmarks["run"].programs())
    for file in (BENCHMARKS / "kept").glob("*.json"):
        for one in benchmarks["figures"].kept(file.stem):
            assert one.measured, one
            assert one.unit, one
            assert one.machine, one
            assert one.commit or one.source, one
        assert file.stem in programs or all(one.source for one in benchmarks["figures"].kept(file.stem)), file


def test_every_program_prints_its_figures_by_the_one_helper(benchmarks: dict[str, ModuleType]) -> None:
    for program in benchmarks["run"].programs():
        tree = ast.parse((BENCHMARKS / f"{program}.py").read_text(encoding="utf-8"))
        imported = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)}
        assert imported & {"figures", "backlogs"}, program
        names = {node.id for node in ast.walk(tree) if isinstance(node, ast.Name)}
        assert names & {"figure", "compared"}, program


def test_a_printed_figure_is_kept_in_the_place_of_the_one_with_its_name(
    benchmarks: dict[str, ModuleType], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    figures = benchmarks["figures"]
    for value in (1.23456, 98765.4):
        figures.figure("a load of 3 rows", value, "s", "a copy of them", 2.0)
        figures.figure("another", None, "s")
        (line,) = capsys.readouterr().out.splitlines()
        printed = figures.parsed(line)
        assert figures.parsed("something else") is None
        figures.keep("bench", [printed], tmp_path)
    (kept,) = figures.kept("bench", tmp_path)
    assert (kept.value, kept.reference_value, kept.reference_unit) == (98800, 2, "s")
    assert kept.measured
    assert kept.machine
    assert len(json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))) == 1


def test_a_promise_is_kept_or_not_by_its_bound(benchmarks: dict[str, ModuleType]) -> None:
    promise, figure = benchmarks["promises"].Promise, benchmarks["figures"].Figure
    six_of_four = figure("f", 6.0, "s", "r", 4.0, "s", "2026-01-01", "nothing else", "a machine", "abc")
    assert promise("p", "page", "program", "f", 6).kept(six_of_four)
    assert not promise("p", "page", "program", "f", 5).kept(six_of_four)
    assert promise("p", "page", "program", "f", 1.5, of_reference=True).kept(six_of_four)
    assert not promise("p", "page", "program", "f", 1.6, of_reference=True, at_least=True).kept(six_of_four)
