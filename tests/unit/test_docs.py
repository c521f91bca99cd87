"""The pages say nothing that is not there: links, modules, tests, error codes, keys and example files are looked up."""

from __future__ import annotations

import ast
import importlib
import itertools
import os
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest
from pydantic import BaseModel

from headwater.lake import ledger, validations
from headwater.lake.freshness import Outcome
from headwater.pipeline_file.pipeline import (
    Defaults,
    Lake,
    Load,
    Pipeline,
    Replicate,
    Source,
    Storage,
    TableEntry,
    load_pipeline,
)
from headwater.source import connection, slot

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
CODE = sorted([*(ROOT / "spark_jobs").rglob("*.py"), *(ROOT / "plugins").rglob("*.py")])

_LINK = re.compile(r"\]\(([^)\s]+)\)")
_TEST = re.compile(r"`(tests/[\w/]+\.py)(?:::(\w+))?`")
_MODULE = re.compile(r"(?<![\w/.])(headwater(?:_airflow)?(?:\.[A-Za-z_]\w*)+)")
_FILE = re.compile(r"`((?:dags|docs|plugins|spark_jobs)/[\w./-]+)`")
_YAML = re.compile(r"^```yaml\n(.*?)^```", re.DOTALL | re.MULTILINE)
_PYTHON = re.compile(r"^```python\n(.*?)^```", re.DOTALL | re.MULTILINE)
_HEADING = re.compile(r"^#+ +(.+)$", re.MULTILINE)

# Codes that the code puts together: `f"{kind}_table"`, and the name of a setting without room.
_COMPOSED = {"unlogged_table", "temporary_table", "max_replication_slots", "max_wal_senders"}


def _page_id(page: Path) -> str:
    return str(page.relative_to(ROOT))


def _anchors(page: Path) -> set[str]:
    headings = _HEADING.findall(page.read_text(encoding="utf-8"))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("page", PAGES, ids=_page_id)
def test_every_relative_link_leads_somewhere(page: Path) -> None:
    broken = []
    for target in _LINK.findall(page.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        found = page if not file else Path(os.path.normpath(page.parent / file))
        if not found.exists() or not found.is_relative_to(ROOT) or (anchor and anchor not in _anchors(found)):
            broken.append(target)
    assert not broken


@pytest.mark.parametrize("page", PAGES, ids=_page_id)
def test_every_test_and_file_that_a_page_names_exists(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    missing = [name for name in _FILE.findall(text) if not (ROOT / name).exists()]
    for file, test in _TEST.findall(text):
        path = ROOT / file
        if not path.is_file() or (test and test not in _functions(path)):
            missing.append(f"{file}::{test}")
    assert not missing


@pytest.mark.parametrize("page", PAGES, ids=_page_id)
def test_every_module_that_a_page_names_exists(page: Path) -> None:
    missing = [name for name in _MODULE.findall(page.read_text(encoding="utf-8")) if not _exists(name)]
    assert not missing


def test_every_error_code_is_in_the_page_of_errors() -> None:
    page = (ROOT / "docs" / "reference" / "errors.md").read_text(encoding="utf-8")
    described = set(re.findall(r"`(\w+)`", page))
    assert _codes() - described == set()


def test_every_code_that_the_page_of_errors_lists_can_occur() -> None:
    page = (ROOT / "docs" / "reference" / "errors.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if line.startswith("| `")]
    listed = {code for row in rows for code in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert listed - _codes() == set()


def test_every_key_of_the_pipeline_file_is_in_the_reference() -> None:
    page = (ROOT / "docs" / "reference" / "pipeline-file.md").read_text(encoding="utf-8")
    described = set(re.findall(r"^\| `([\w.\[\]]+)` \|", page, re.MULTILINE))
    sections: dict[str, type[BaseModel]] = {
        "source": Source,
        "lake": Lake,
        "lake.storage": Storage,
        "load": Load,
        "replicate": Replicate,
        "defaults": Defaults,
    }
    keys = {
        *(f"{name}.{field.alias or key}" for name, s in sections.items() for key, field in s.model_fields.items()),
        *(f"tables[].{field.alias or key}" for key, field in TableEntry.model_fields.items()),
        *(field.alias or key for key, field in Pipeline.model_fields.items() if key not in sections),
    }
    assert described - {"tables[]"} == keys - {"tables"}
    assert "tables[]" in described


@pytest.mark.parametrize(("name", "schema"), [("Ledger", ledger._SCHEMA), ("Validations", validations._SCHEMA)])
def test_the_columns_of_a_table_of_headwaters_own_are_in_the_page_of_the_lake(name: str, schema: pa.Schema) -> None:
    rows = _table_after(f"**{name}**", ROOT / "docs" / "reference" / "lake.md")
    described: dict[str, str] = {}
    for cells in rows:
        columns, types = re.findall(r"`(\w+)`", cells[0]), cells[1].split(", ")
        described |= zip(columns, types * len(columns) if len(types) == 1 else types, strict=True)
    assert described == {field.name: _described_type(field.type) for field in schema}


def test_the_fields_of_a_table_in_the_ledger_are_in_the_page_of_the_lake() -> None:
    rows = _table_after("**Ledger**", ROOT / "docs" / "reference" / "lake.md")
    (meaning,) = (cells[2] for cells in rows if cells[0] == "`tables`")
    assert set(re.findall(r"`(\w+)`", meaning)) == {field.name for field in ledger._TABLE}


def test_every_row_of_the_lineage_names_a_test_or_says_why_there_is_none() -> None:
    page = (ROOT / "docs" / "lineage.md").read_text(encoding="utf-8")
    rows = [line for line in page.splitlines() if re.match(r"\| [A-Z]\d+ \|", line)]
    silent = [row for row in rows if not re.search(r"`tests/|not built yet|no meaning here", row, re.IGNORECASE)]
    assert rows
    assert not silent


def test_every_pipeline_file_in_the_pages_is_a_valid_one(tmp_path: Path) -> None:
    examples = [text for page in PAGES for text in _YAML.findall(page.read_text(encoding="utf-8"))]
    assert examples
    for number, text in enumerate(examples):
        file = tmp_path / f"{number}.yaml"
        file.write_text(text, encoding="utf-8")
        load_pipeline(file, {"HEADWATER_SOURCE": "postgresql://headwater@localhost/shop"})


def test_every_python_example_in_the_pages_is_python() -> None:
    for page in PAGES:
        for text in _PYTHON.findall(page.read_text(encoding="utf-8")):
            compile(text, _page_id(page), "exec")


def test_every_environment_variable_that_a_page_names_is_read_somewhere() -> None:
    code = "".join(
        path.read_text(encoding="utf-8") for path in [*CODE, *(ROOT / "dags").rglob("*.py"), ROOT / "Makefile"]
    )
    for page in PAGES:
        for name in re.findall(r"HEADWATER_[A-Z_]+", page.read_text(encoding="utf-8")):
            assert name in code, f"{_page_id(page)}: {name}"


def test_the_page_of_what_others_write_has_a_row_for_each_case_of_its_test() -> None:
    page = (ROOT / "docs" / "reference" / "foreign-writes.md").read_text(encoding="utf-8")
    rows = [[c.strip() for c in line.strip("|").split(" | ")] for line in page.splitlines() if line.startswith("| ")]
    told = {cells[0]: cells[1] for cells in rows if cells[1] in ("accepted", "suspended")}
    assert len(told) == len(rows) - page.count("\n| what you do |")
    assert told == _cases(ROOT / "tests" / "integration" / "replicate" / "test_foreign_writes.py")


def test_where_to_look_is_a_file_that_holds_what_to_look_for() -> None:
    rows = _table_after("## Where is it?", ROOT / "docs" / "architecture.md")
    assert len(rows) >= 10
    for question, where, what in rows:
        files = [ROOT / name for name in _FILE.findall(where)]
        names = re.findall(r"`([\w.]+)`", what)
        found = {(file, name) for file in files for name in names if _defines(file, name.split("."))}
        assert {file for file, _ in found} == set(files), question
        assert {name for _, name in found} == set(names), question


def test_the_picture_of_the_rooms_is_the_one_that_import_linter_holds() -> None:
    page = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    picture = page.partition("## Rooms and import direction")[2].split("```")[1]
    floors = [re.split(r"\s{2,}", line)[0] for line in picture.strip().splitlines()]
    layers = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]
    held = layers["contracts"][0]["layers"]
    rooms = floors[:-1]
    assert floors[-1] == "(ground)"
    assert rooms == held[: len(rooms)]
    ground = {name for floor in held[len(rooms) :] for name in floor.split(" | ")}
    assert all((ROOT / "spark_jobs" / "headwater" / f"{name}.py").is_file() for name in ground)


def _cases(path: Path) -> dict[str, str]:
    """What comes of each case of `CASES`, which has a reason where the table is suspended."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    cases = next(node.value for node in tree.body if isinstance(node, ast.Assign) and _name_of(node) == "CASES")
    assert isinstance(cases, ast.Dict)
    found = {}
    for key, case in zip(cases.keys, cases.values, strict=True):
        assert isinstance(key, ast.Constant)
        assert isinstance(case, ast.Call)
        found[str(key.value)] = "suspended" if len(case.args) > 1 else "accepted"
    return found


def _table_after(heading: str, page: Path) -> list[list[str]]:
    """The cells of the first table behind `heading`, row by row, without its head."""
    text = page.read_text(encoding="utf-8").partition(heading)[2]
    lines = itertools.takewhile(lambda line: line.startswith("|"), text[text.index("\n|") + 1 :].splitlines())
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines][2:]


def _described_type(kind: pa.DataType) -> str:
    if pa.types.is_map(kind):
        return f"map {_described_type(kind.key_type)} -> {_described_type(kind.item_type)}"
    if pa.types.is_struct(kind):
        return "struct"
    return {"int64": "bigint", "bool": "boolean", "timestamp[us, tz=UTC]": "timestamp"}.get(str(kind), str(kind))


def _functions(path: Path) -> set[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}


def _exists(name: str) -> bool:
    """Whether `name` is a module or a Java class of ours, or something in a module; found in the source, so that no
    engine is imported."""
    parts = name.split(".")
    base = ROOT / ("plugins" if parts[0] == "headwater_airflow" else "spark_jobs")
    for end in range(len(parts), 0, -1):
        path = base.joinpath(*parts[:end])
        module = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
        if path.with_suffix(".java").is_file():
            return end == len(parts)
        if module.is_file():
            return _defines(module, parts[end:]) or (end == 1 and _is_public(parts))
    return False


def _is_public(parts: list[str]) -> bool:
    return len(parts) == 2 and parts[1] in importlib.import_module(parts[0]).__all__


def _defines(module: Path, names: list[str]) -> bool:
    body: list[ast.stmt] = ast.parse(module.read_text(encoding="utf-8")).body
    for name in names:
        found = [node for node in body if _name_of(node) == name]
        if not found:
            return False
        body = found[0].body if isinstance(found[0], ast.ClassDef) else []
    return True


def _name_of(node: ast.stmt) -> str:
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return node.name
    if isinstance(node, ast.ImportFrom):  # handed on by a door
        return node.names[0].asname or ""
    targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
    return targets[0].id if targets and isinstance(targets[0], ast.Name) else ""


def _codes() -> set[str]:
    """Every code that an error, a finding or a wait can have."""
    return {
        *(code for path in CODE for code in _codes_in(ast.parse(path.read_text(encoding="utf-8")))),
        *_COMPOSED,
        *(str(outcome) for outcome in Outcome if outcome is not Outcome.SATISFIED),
        *connection._CANCELLED.values(),
        *(code for _, code, _ in connection._LOGIN_FAILURES),
        *(code for code, _ in slot._REFUSALS.values()),
    }


def _codes_in(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        found = _code_of(node)
        if isinstance(found, ast.Constant) and isinstance(found.value, str):
            yield found.value


def _code_of(node: ast.AST) -> ast.expr | None:
    if isinstance(node, ast.keyword) and node.arg == "code":
        return node.value
    if isinstance(node, ast.Assign) and any(isinstance(t, ast.Name) and t.id == "default_code" for t in node.targets):
        return node.value
    if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id in ("error", "warning"):
        return node.args[0] if node.args else None
    return None
