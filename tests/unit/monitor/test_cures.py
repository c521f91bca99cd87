"""What a page can do about a remedy: the same as the command that it begins with, and nothing where it begins with
something that a person has to do."""

from __future__ import annotations

from typing import Any

import pytest

from headwater.gate.wal_ceiling import REMEDY
from headwater.monitor.cures import cure_of
from headwater.pipeline_file.pipeline import parse_pipeline

LOAD_AGAIN = {"dag": "load", "conf": {"tables": ["public.a"], "again": True}}


def here(remedy: str) -> str:
    """As `status` and the pages show it."""
    text = "pipeline: shop\nsource: {connection: 'postgresql://x@h/d'}\nlake: {root: 'file:///l'}\ntables: [public.a]\n"
    pipeline = parse_pipeline(text.encode(), "/etc/my pipelines/shop.yaml", {})
    return pipeline.with_file(remedy)


@pytest.mark.parametrize(
    ("remedy", "cure"),
    [
        ("headwater load PIPELINE.yaml --table public.a --again", LOAD_AGAIN),
        ("headwater load PIPELINE.yaml --table public.a --again begins a new one", LOAD_AGAIN),
        ("headwater load PIPELINE.yaml --table public.a --again, which brings about all of it", LOAD_AGAIN),
        ("headwater load PIPELINE.yaml --table public.a --again (or name it in columns.exclude first)", LOAD_AGAIN),
        ("headwater resume PIPELINE.yaml --table public.a", LOAD_AGAIN),
        (
            'headwater load PIPELINE.yaml --table public."Order Lines" --again',
            {"dag": "load", "conf": {"tables": ['public."Order Lines"'], "again": True}},
        ),
        ("headwater resume PIPELINE.yaml", {"dag": "resume", "conf": {}}),
        ("headwater load PIPELINE.yaml", {"dag": "load", "conf": {}}),
        ("headwater replicate PIPELINE.yaml", {"dag": "replicate", "conf": {}}),
        (
            "headwater verify PIPELINE.yaml --table public.a --repair",
            {"dag": "verify", "conf": {"tables": ["public.a"], "repair": True}},
        ),
        (REMEDY, {"dag": "verify", "conf": {"tables": [], "repair": True}}),
        ("headwater reload PIPELINE.yaml --changed", {"dag": "reload", "conf": {"changed": True}}),
        (
            "headwater reload PIPELINE.yaml --table public.a --partition a_1 --partition a_2",
            {"dag": "reload", "conf": {"table": "public.a", "partitions": ["a_1", "a_2"]}},
        ),
        (
            "headwater reload PIPELINE.yaml --table public.a --where 'id between 5 and 9'",
            {"dag": "reload", "conf": {"table": "public.a", "where": "id between 5 and 9"}},
        ),
        ("", None),
        ("headwater doctor PIPELINE.yaml", None),
        ("headwater load PIPELINE.yaml --again --new-source", None),
        ("headwater verify PIPELINE.yaml --repair --new-source", None),
        ("headwater load PIPELINE.yaml --again", None),
        ("drop the constraint, then headwater load PIPELINE.yaml --table public.a --again", None),
        ("ALTER TABLE public.a SET LOGGED; then headwater load PIPELINE.yaml --table public.a --again", None),
        ("put right what the reason names, then headwater verify PIPELINE.yaml --table public.a --repair", None),
    ],
)
def test_a_button_does_what_the_command_does_or_is_not_there(remedy: str, cure: dict[str, Any] | None) -> None:
    assert cure_of(here(remedy)) == cure


def test_a_remedy_is_a_line_for_a_shell() -> None:
    assert here('headwater load PIPELINE.yaml --table public."Order Lines" --again') == (
        "headwater load '/etc/my pipelines/shop.yaml' --table 'public.\"Order Lines\"' --again"
    )
    quoted = "headwater reload PIPELINE.yaml --table 'public.\"A\"' --partition p"
    assert here(quoted).endswith("--table 'public.\"A\"' --partition p"), "it was one already"
