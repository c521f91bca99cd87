"""What a task makes of its job's exit status: Headwater's own mean what they say, those of a user's job do not."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest

from headwater.errors import Refused, Transient

if TYPE_CHECKING:
    from headwater_airflow.operators.spark import HeadwaterSparkOperator

REFUSED = Refused("no right to read", where="lake", remedy="grant it").to_json()

pytestmark = pytest.mark.usefixtures("airflow_home")


def ended(task: HeadwaterSparkOperator, status: int, result: dict[str, Any] | None) -> tuple[bool, str]:
    """Whether the failure is final, and what it says."""
    from airflow.sdk.exceptions import AirflowException, AirflowFailException

    submission: Any = SimpleNamespace(exit_status=status, result=result, stop_requested=False)
    context: Any = {"ti": SimpleNamespace(xcom_push=lambda key, value: None)}
    with pytest.raises(AirflowException) as failed:
        task._ended(submission, context)
    return isinstance(failed.value, AirflowFailException), str(failed.value)


@pytest.mark.parametrize(
    ("status", "result"),
    [
        (1, None),
        (2, None),  # as of a Python that cannot open its file
        (4, {"tables": {}}),
        (5, {"rows": 3}),
        (2, {"error": "the mart is closed"}),
        (2, {"error": {"step": 7}}),
        (7, REFUSED),
        (1, Transient("the store is away").to_json()),
    ],
)
def test_a_users_job_that_fails_is_tried_again_whatever_its_status(status: int, result: dict[str, Any] | None) -> None:
    from headwater_airflow.operators.spark import SparkOnCutOperator

    task = SparkOnCutOperator(task_id="job", application="job.py", cut={"pipeline": "shop", "tables": {}})
    final, said = ended(task, status, result)
    assert not final
    assert said.startswith(f"the job failed (exit status {status}): ")


def test_a_users_job_may_hand_on_what_headwater_refused() -> None:
    from headwater_airflow.operators.spark import SparkOnCutOperator

    task = SparkOnCutOperator(task_id="job", application="job.py", cut={"pipeline": "shop", "tables": {}})
    final, said = ended(task, 2, REFUSED)
    assert final
    assert said.endswith("no right to read. What to do: grant it")


@pytest.mark.parametrize(("status", "is_final"), [(1, False), (2, True), (4, True), (5, True)])
def test_of_headwaters_jobs_the_status_decides(status: int, is_final: bool) -> None:
    from headwater_airflow.operators.spark import LoadOperator

    assert ended(LoadOperator(task_id="load", pipeline="shop.yaml"), status, None)[0] is is_final
