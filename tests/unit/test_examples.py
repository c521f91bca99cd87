"""The examples in the pages hold: commands parse, Python uses what exists, the schema knows each pipeline file."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import re
import shlex
from pathlib import Path
from types import ModuleType
from typing import Any

import jsonschema
import pytest
import yaml

from headwater.cli.arguments import parser

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])
_BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)
_SOURCE = "postgresql://dba@db/shop"
_STANDS_FOR = {"$DBA": _SOURCE, "CONNINFO": _SOURCE, "ROOT": "/lake", "file://$PWD/lake": "/lake"}
_STANDS_FOR |= {"N": "shop", "PATTERN": "public.*"}
_OURS = ("headwater", "headwater_airflow", "airflow")


def _blocks(page: Path, *kinds: str) -> list[str]:
    return [text for kind, text in _BLOCK.findall(page.read_text(encoding="utf-8")) if kind in kinds]


def _commands(page: Path) -> list[list[str]]:
    """The arguments of each line that calls `headwater`; of a synopsis every option, and the first choice."""
    found = []
    for text in _blocks(page, "", "sh"):
        for line in re.sub(r"\\\n\s*", "", text).splitlines():
            if not line.startswith("headwater ") or line.startswith("headwater demo"):
                continue
            call = re.split(r" [|&<>] | 2>| &$", re.sub(r" \| --[a-z-]+", "", line))[0]
            call = re.sub(r"[\[\]]", "", re.sub(r"\]\.\.\.", "]", call))
            found.append([re.sub(r"(?<=\w)\|.*", "", part) for part in shlex.split(call, comments=True)[1:]])
    return found


def test_every_command_in_the_pages_is_understood() -> None:
    commands = [(page.name, arguments) for page in PAGES for arguments in _commands(page)]
    assert len(commands) > 25
    for page, arguments in commands:
        try:
            parser().parse_args([_STANDS_FOR.get(part, part) for part in arguments])
        except SystemExit:
            pytest.fail(f"{page}: headwater {shlex.join(arguments)}")


def test_every_option_that_the_pages_speak_of_exists() -> None:
    [commands] = [action.choices for action in parser()._actions if isinstance(action.choices, dict)]
    for page in PAGES:
        for command, rest in re.findall(r"`headwater (\w+)([^`]*)`", page.read_text(encoding="utf-8")):
            options = set(re.findall(r"(?<!\S)--[a-z-]+", rest)) - {"--help"}
            if options and command != "demo":
                assert options <= set(commands[command]._option_string_actions), f"{page.name}: {command}{rest}"


@pytest.mark.parametrize("page", [p for p in PAGES if _blocks(p, "python")], ids=lambda page: page.name)
def test_python_examples_use_names_and_arguments_that_exist(page: Path) -> None:
    known: dict[str, Any] = {"headwater": importlib.import_module("headwater")}
    for text in _blocks(page, "python"):
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and str(node.module).split(".")[0] in _OURS:
                module = importlib.import_module(str(node.module))
                known |= {name.asname or name.name: getattr(module, name.name) for name in node.names}
    for text in _blocks(page, "python"):
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and (called := _called(node.func, known)) is not None:
                arguments = inspect.signature(called).parameters
                if not any(a.kind is a.VAR_KEYWORD for a in arguments.values()) or called.__module__.startswith(
                    "headwater"
                ):
                    _bound(called, node, page)


def _called(function: ast.expr, known: dict[str, Any]) -> Any:
    if isinstance(function, ast.Name):
        return known.get(function.id)
    if isinstance(function, ast.Attribute) and isinstance(function.value, ast.Name):
        base = known.get(function.value.id)
        return getattr(base, function.attr) if isinstance(base, ModuleType) else None
    return None


def _bound(called: Any, call: ast.Call, page: Path) -> None:
    keywords = {keyword.arg: None for keyword in call.keywords if keyword.arg}
    try:
        inspect.signature(called).bind(*call.args, **keywords)
    except TypeError as error:
        pytest.fail(f"{page.name}: {ast.unparse(call)}: {error}")


def _hooks() -> ModuleType:
    spec = importlib.util.spec_from_file_location("hooks", ROOT / "docs" / "hooks.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_schema_knows_every_pipeline_file_in_the_pages_and_explains_every_key() -> None:
    schema = _hooks().schema()
    files = [yaml.safe_load(text) for page in PAGES for text in _blocks(page, "yaml")]
    assert files
    for file in files:
        jsonschema.validate(file, schema)
    with pytest.raises(jsonschema.ValidationError, match="retention"):
        jsonschema.validate({**files[0], "lake": {"root": "/lake", "retention": "1d"}}, schema)
    for section in ("Source", "Lake", "Load", "Replicate", "TableEntry"):
        unexplained = [
            key for key, value in schema["$defs"][section]["properties"].items() if not value.get("description")
        ]
        assert not unexplained


def test_the_list_of_options_has_every_command() -> None:
    page = _hooks().command_line()
    [commands] = [action.choices for action in parser()._actions if isinstance(action.choices, dict)]
    assert [name for name in commands if f"\n## {name}\n" not in page] == []
    assert "--take-over" in page
