"""Assets as a DAG file makes them: what they refuse, and which of them are one and the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from fixtures.pages import page_pipeline

pytestmark = pytest.mark.usefixtures("airflow_home")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    logs = {"name": "public.log_*", "exclude": ["public.log_old"]}
    return page_pipeline(tmp_path, "shop", "public.a", logs, defaults={"freshness": "60s"})


@pytest.mark.parametrize("name", ["public.typo", "public.log_old"])
def test_an_alarm_for_a_table_that_the_file_does_not_replicate_is_refused(file: Path, name: str) -> None:
    """It would never come."""
    from headwater_airflow.assets import late

    assert late(file, ["public.log_2026", "Public.A"]).name == "shop: public.a, public.log_2026 late"
    with pytest.raises(ValueError, match=rf"replicates no table {name}"):
        late(file, ["public.a", name])
