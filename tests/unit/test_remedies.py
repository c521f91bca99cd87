"""A remedy can be typed: a command in it names the pipeline's file, in whose place `with_file` puts the real one."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headwater.errors import Refused
from headwater.names import TableName
from headwater.spark.session import require_exclusive
from headwater.waiting.wanted_partitions import refuse_unwanted

ROOT = Path(__file__).resolve().parents[2]
SOURCES = sorted((ROOT / "spark_jobs" / "headwater").rglob("*.py"))
COMMAND = re.compile(
    r"headwater (check|init|load|reload|rebuild|replicate|status|top|doctor|verify|validate|maintain|pause|resume)\b"
)
SAYERS = {"error", "warning", "Verdict", "not_wanted"}
"""Functions that are given a remedy by its place."""


def _text(node: ast.AST) -> str:
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(part) if isinstance(part, ast.Constant) else "{}" for part in node.values)
    return ""


def remedies(file: Path) -> Iterator[str]:
    """Texts that are remedies, or stand where one may."""
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Call):
            yield from (_text(one.value) for one in node.keywords if one.arg == "remedy")
            if isinstance(node.func, ast.Name) and node.func.id in SAYERS:
                yield from map(_text, node.args)
        elif isinstance(node, ast.Assign) and any("remedy" in ast.unparse(target) for target in node.targets):
            yield _text(node.value)


@pytest.mark.parametrize("file", SOURCES, ids=lambda file: str(file.relative_to(ROOT)))
def test_a_command_in_a_remedy_names_the_pipeline_file(file: Path) -> None:
    bare = [
        said
        for said in remedies(file)
        for found in COMMAND.finditer(said)
        if not said[found.end() :].startswith((" PIPELINE.yaml", " {}", " leaves such files"))
    ]
    assert bare == []


def test_what_names_no_file_of_its_own_is_found_too() -> None:
    nothing: Any = None
    with pytest.raises(Refused, match="once the folder is removed there") as refused:
        require_exclusive(nothing, "s3://bucket/shop/public/t")
    assert "headwater load PIPELINE.yaml --table T --again" in refused.value.remedy
    with pytest.raises(Refused, match=r"headwater status PIPELINE\.yaml"):
        refuse_unwanted({TableName("public", "t"): []}, ["public.u"])
