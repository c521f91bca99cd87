"""Spark is told a place with its file system: a bare path lies in Hadoop's default one, which may be a cluster's."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ENGINE = Path(__file__).resolve().parents[3] / "spark_jobs" / "headwater"
SOURCES = [path for path in sorted(ENGINE.rglob("*.py")) if re.search(r"\bpyspark\b|delta\.tables\b", path.read_text())]
TAKES_A_PLACE = {"save", "forPath", "parquet", "load", "location"}
"""Methods of Spark's readers, writers and tables."""
IN_SQL = re.compile(r"delta\.`(?!\{hadoop_place\()|LOCATION (?!\{_quoted\(hadoop_place\()")


def bare_places(source: str) -> list[str]:
    """Calls, and pieces of SQL, that name a place otherwise than by `hadoop_place`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in TAKES_A_PLACE:
            # `forPath` has the session first.
            named = [ast.unparse(one) for one in node.args][-1:]
            found += [ast.unparse(node) for one in named if not re.match(r"(\*map\()?hadoop_place\b", one)]
        elif isinstance(node, ast.JoinedStr) and IN_SQL.search(ast.unparse(node)):
            found.append(ast.unparse(node))
    return found


def test_spark_is_told_every_place_with_its_file_system() -> None:
    found = {path.relative_to(ENGINE).as_posix(): bare_places(path.read_text()) for path in SOURCES}
    assert {name: bare for name, bare in found.items() if bare} == {}


@pytest.mark.parametrize(
    "source",
    [
        "frame.write.save(path)",
        "DeltaTable.forPath(spark, plan.path)",
        "frame.write.parquet(folder)",
        "spark.read.parquet(*places)",
        "spark.read.format('delta').load(str(path))",
        "builder.location(path)",
        "spark.sql(f'ALTER TABLE delta.`{path}` ADD COLUMNS (a int)')",
        "spark.sql(f'CREATE TABLE a USING delta LOCATION {_quoted(path)}')",
    ],
)
def test_bare_places_are_seen(source: str) -> None:
    assert bare_places(source)
