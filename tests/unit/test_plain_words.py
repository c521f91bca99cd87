"""Words that a reader trips over, kept out of what people read: the docs, the changelog, help texts and messages."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PROSE = [
    ROOT / "README.md",
    ROOT / "CHANGELOG.md",
    # Not the pages that a program writes.
    *(file for file in sorted((ROOT / "docs").rglob("*.md")) if "benchmarks" not in file.parts),
]
SOURCES = [*(ROOT / "spark_jobs").rglob("*.py"), *(ROOT / "plugins").rglob("*.py"), *(ROOT / "dags").rglob("*.py")]
PAGES = sorted((ROOT / "plugins" / "headwater_airflow" / "page" / "static").glob("*.js"))

INSTEAD = {
    r"anew": "again",
    r"asks? nothing": "do not prompt",
    r"write over": "overwrite",
    r"stop after so long": "maximum run time",
    r"so far back|look back so far": "time window",
    r"whom": "who, or the role, table or task by its name",
    r"as libpq says it": "connection string (libpq)",
    r"commit to visible": "end-to-end latency, commit to readable",
    r"held up|holds? up": "blocked by",
    r"known by": "evidence",
    r"written by somebody else": "written by another program",
    r"no driver replicates\b(?! until)": "replication is stopped",
    r"what only the source can tell": "values marked – are unknown",
    r"of unknown age": "leave it out",
    r"where it stands": "position",
    r"away with it": "clean up",
    r"looks? again every": "refreshes every",
    r"the whole way": "end to end",
    r"can be had": "is there",
}
"""What is not written, and what is written in its place."""

LONGEST = 35
"""Words of a sentence. A colon ends one, too; a semicolon does not."""

FOUND = re.compile("|".join(rf"(?P<w{n}>\b(?:{words})\b)" for n, words in enumerate(INSTEAD)), re.IGNORECASE)


def tripped(text: str) -> Iterator[tuple[int, str]]:
    """The lines on which a reader trips, and what to write there."""
    for number, line in enumerate(text.splitlines(), 1):
        for found in FOUND.finditer(line):
            instead = list(INSTEAD.values())[int((found.lastgroup or "w0")[1:])]
            yield number, f"{found[0]!r}: write {instead}"


def test_the_words_are_found() -> None:
    assert list(tripped("all is loaded anew,\nheld up by\nlatency")) == [
        (1, "'anew': write again"),
        (2, "'held up': write blocked by"),
    ]


@pytest.mark.parametrize("file", PROSE, ids=lambda file: str(file.relative_to(ROOT)))
def test_pages_are_in_plain_words(file: Path) -> None:
    text = re.sub(r"`[^`\n]+`", "`code`", file.read_text(encoding="utf-8"))
    assert [f"{file.name}:{number}: {said}" for number, said in tripped(text)] == []


def sentences(text: str) -> Iterator[str]:
    """Those of the prose of a page in Markdown, and of its tables, cell by cell; without code and where links lead."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"`[^`\n]+`", "code", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", text))
    for block in re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.) |\n?\|", text):
        yield from re.split(r"(?<=[.!?:])\s+", " ".join(block.split()))


def test_sentences_end_where_they_end() -> None:
    page = "One [link to it](a.md): code `a. b.`\nof it. Two.\n\n- three\n- four. Five\n\n```\nsix.\n```\n\n| 7 | 8 |\n"
    found = [sentence for sentence in sentences(page) if sentence]
    assert found == ["One link to it:", "code code of it.", "Two.", "- three", "four.", "Five", "7", "8"]


@pytest.mark.parametrize("file", PROSE, ids=lambda file: str(file.relative_to(ROOT)))
def test_no_sentence_is_too_long_to_be_read_once(file: Path) -> None:
    found = [one for one in sentences(file.read_text(encoding="utf-8")) if len(one.split()) > LONGEST]
    assert found == [], f"more than {LONGEST} words: make two sentences, or a list, of each"


def test_help_texts_and_messages_are_in_plain_words() -> None:
    found = []
    for file in SOURCES:
        tree = ast.parse(file.read_text(encoding="utf-8"))
        documentation = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in documentation:
                said = [said for _, said in tripped(node.value)]
                found += [f"{file.relative_to(ROOT)}:{node.lineno}: {one}" for one in said]
    assert found == []


def test_pages_of_airflow_are_in_plain_words() -> None:
    found = []
    for file in PAGES:
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
            said = line.strip()
            if not said.startswith(("//", "*", "/*")):
                found += [f"{file.name}:{number}: {one}" for _, one in tripped(line)]
    assert found == []
