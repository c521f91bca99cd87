"""The text of a new pipeline file: whatever a table is called, it is read back as that table."""

from __future__ import annotations

import shlex
import sys

import pytest

from headwater.errors import Refused
from headwater.names import TableName, TablePattern
from headwater.pipeline_file.pipeline import parse_pipeline
from headwater.setup.init import choose
from headwater.setup.new_file import Chosen, text_of
from headwater.setup.survey import Surveyed
from headwater.source.problems import error
from headwater.terminal.render import render

ODD = [
    "plain",
    "Order Lines",
    "a\nb",
    "a\r\n# b",
    "a\x85b",
    "a\u2028b",
    "a\u00a0b",
    "\ufeff",
    "\x7f",
    "${A}\n",
    "é 𝄞\t'\"",
]


def surveyed(name: str, *, possible: bool = True) -> Surveyed:
    table = TableName("public", name)
    obstacles = () if possible else (error("unlogged_table", str(table), "it is unlogged", ""),)
    return Surveyed(table, 0, None, "none", (), {}, (), obstacles, ())


@pytest.mark.parametrize("name", ODD)
def test_a_name_is_read_back_as_itself_wherever_it_stands(name: str) -> None:
    table, other = surveyed(name), surveyed("other")
    entries = [Chosen(table.name, (table,)), Chosen(TablePattern.parse("public.*"), (other,), (table.name,))]
    text = text_of("shop", "/lake", entries, [], "host=h")
    found = parse_pipeline(text.encode(), "shop.yaml", {"HEADWATER_SOURCE": "host=h"})
    assert [str(entry.name) for entry in found.tables] == [str(table.name), "public.*"]
    assert found.tables[1].exclude == (table.name,)


@pytest.mark.parametrize("name", ODD)
def test_a_table_that_is_left_out_stays_in_its_comment(name: str) -> None:
    other, out = surveyed("other"), surveyed(name, possible=False)
    text = text_of("shop", "/lake", [Chosen(other.name, (other,))], [out], "host=h")
    found = parse_pipeline(text.encode(), "shop.yaml", {"HEADWATER_SOURCE": "host=h"})
    assert [str(entry.name) for entry in found.tables] == ["public.other"]


def test_a_plain_name_is_written_plainly() -> None:
    table = surveyed("orders")
    assert "  - public.orders  # " in text_of("shop", "/lake", [Chosen(table.name, (table,))], [], "host=h")


def test_an_exclusion_that_no_table_has_is_refused() -> None:
    found = [surveyed("a"), surveyed("b")]
    with pytest.raises(Refused) as refused:
        choose(found, (), (TableName("public", "B"),))
    assert (refused.value.code, refused.value.where) == ("table_missing", "--exclude")
    entries, _ = choose(found, (), (TableName("public", "b"), TablePattern.parse("public.x*")))
    assert [str(entry.name) for entry in entries] == ["public.a"]


def test_what_comes_next_can_be_pasted_into_a_shell(capsys: pytest.CaptureFixture[str]) -> None:
    source = "host=h user=shop password=... application_name='a $(b) \"c\"'"
    result = {"file": "/my files/shop.yaml", "role": "shop", "source": source, "sql": "", "pipeline": "shop"}
    render("init", result, sys.stdout)
    said = capsys.readouterr().out
    assert "(headwater init '/my files/shop.yaml' --sql --role shop prints it again)" in said
    [export] = [line for line in said.splitlines() if "export " in line]
    assert shlex.split(export, comments=True) == ["export", f"HEADWATER_SOURCE={source}"]
    assert "\n  headwater load '/my files/shop.yaml'\n" in said
    render("init", {**result, "role": "headwater"}, sys.stdout)
    assert "shop.yaml' --sql prints it again)" in capsys.readouterr().out
