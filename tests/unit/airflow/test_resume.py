"""The task that resumes a pipeline, where it cannot."""

from __future__ import annotations

from pathlib import Path

import pytest

PIPELINE = """
pipeline: shop
source:
  connection: postgresql://headwater@127.0.0.1:1/shop
lake:
  root: {root}
tables:
  - public.orders
"""


@pytest.mark.usefixtures("airflow_home")
def test_what_the_command_says_is_the_error_of_the_task(tmp_path: Path) -> None:
    from airflow.sdk.exceptions import AirflowException

    from headwater_airflow.operators.replication import ResumeOperator

    file = tmp_path / "shop.yaml"
    file.write_text(PIPELINE.format(root=(tmp_path / "lake").as_uri()))
    with pytest.raises(AirflowException) as failed:
        ResumeOperator(task_id="resume", pipeline=str(file)).execute({})
    assert str(failed.value) == f"no table is loaded. What to do: headwater load {file}"
