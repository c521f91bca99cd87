"""Which tables of a cut a validation looks at, on a lake driven by hand."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import yaml

from fixtures.lakes import HandLake, position_at
from headwater.errors import Refused
from headwater.pipeline_file.pipeline import Pipeline, load_pipeline
from headwater.reading.newest_views import newest_cut
from headwater.validate.cut import cut_to_validate

A, B = "public.a", "public.b"


@pytest.fixture
def lake(tmp_path: Path) -> HandLake:
    lake = HandLake(tmp_path / "lake", position_at(lsn=0x100), [A, B])
    lake.publish(0x200, A)
    return lake


@pytest.fixture
def pipeline(lake: HandLake, tmp_path: Path) -> Pipeline:
    document = {
        "pipeline": "shop",
        "source": {"connection": "postgresql://reader@127.0.0.1:1/shop"},
        "lake": {"root": Path(lake.root).as_uri()},
        "tables": [A, B],
    }
    (tmp_path / "shop.yaml").write_text(yaml.safe_dump(document))
    return load_pipeline(tmp_path / "shop.yaml")


def test_a_given_cut_leaves_out_what_was_loaded_again_since(lake: HandLake, pipeline: Pipeline) -> None:
    given = newest_cut(pipeline)
    lake.publish(0x300, A, B)
    records = dict(lake.registry.tables)
    assert sorted(cut_to_validate(pipeline, [], given, records)[0]["tables"]) == [A, B]
    under_way = replace(records[B].entered("loading"), incarnation=1)
    for now in (under_way, replace(records[B], incarnation=1, start_lsn=0x280)):
        cut, left_out = cut_to_validate(pipeline, [], given, {**records, B: now})
        assert list(cut["tables"]) == [A]
        assert left_out[B]["reason"] == "it was loaded again since epoch 1"
        with pytest.raises(Refused, match=r"public\.b: it was loaded again since epoch 1"):
            cut_to_validate(pipeline, [], {**given, "tables": {B: given["tables"][B]}}, {**records, B: now})
    assert sorted(cut_to_validate(pipeline, [], None, {**records, B: now})[0]["tables"]) == [A, B]
