"""What the entries of a pipeline file match, and what is said where they match nothing."""

from __future__ import annotations

from headwater.names import TableName
from headwater.pipeline_file.pipeline import TableEntry
from headwater.source.catalog.matching import match_entries
from headwater.source.catalog.relations import ORDINARY, Listed

RELATIONS = [Listed(n, TableName("public", name), ORDINARY, "p", None) for n, name in enumerate(("log_a", "log_b"))]


def test_a_name_in_exclude_that_no_table_has_is_a_warning() -> None:
    entry = TableEntry.model_validate({"name": "public.log_*", "exclude": ["public.log_B", "public.log_c*"]})
    matched, problems = match_entries([entry], RELATIONS)
    assert ([str(one.name) for one, _ in matched], problems) == (["public.log_a"], [])
    entry = TableEntry.model_validate({"name": "public.log_*", "exclude": ["public.log_bb"]})
    matched, [problem] = match_entries([entry], RELATIONS)
    assert len(matched) == 2
    assert (problem.code, problem.severity, problem.where) == ("exclude_missing", "warning", "public.log_*")
    assert "public.log_bb" in problem.message
