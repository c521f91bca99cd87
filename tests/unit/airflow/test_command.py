"""BashOnCutOperator: a command finds the cut in a file, as long as it runs."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

pytestmark = pytest.mark.usefixtures("airflow_home")

CUT: dict[str, Any] = {
    "pipeline": "shop",
    "epoch": 7,
    "tables": {"public.orders": {"path": "/lake/orders", "version": 3}},
}


def operator(cut: Any, command: str, **arguments: Any) -> Any:
    from headwater_airflow.operators.command import BashOnCutOperator

    return BashOnCutOperator(task_id="build", cut=cut, bash_command=command, **arguments)


def test_a_command_reads_the_cut_beside_its_own_and_the_tasks_environment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OF_THE_TASK", "task")
    copied = tmp_path / "copied"
    command = f'cp "$HEADWATER_CUT" {copied} && echo "$HEADWATER_CUT $OF_THE_TASK $OWN"'
    file, *others = operator(CUT, command, env={"OWN": "own"}).execute({}).split()
    assert others == ["task", "own"]
    assert json.loads(copied.read_text()) == CUT
    assert not Path(file).exists()


def test_nothing_is_left_of_a_command_that_fails(tmp_path: Path) -> None:
    from airflow.sdk.exceptions import AirflowException

    told = tmp_path / "told"
    with pytest.raises(AirflowException, match="exit code 3"):
        operator(CUT, f'echo "$HEADWATER_CUT" > {told}; exit 3').execute({})
    assert not Path(told.read_text().strip()).exists()


@pytest.mark.parametrize(
    ("cut", "said"),
    [
        (None, "there is no cut to read"),
        ({**CUT, "fallback": {"pipeline_file": "shop.yaml"}}, "fell back to the source"),
    ],
)
def test_what_cannot_be_read_from_a_file_begins_no_command(cut: Any, said: str, tmp_path: Path) -> None:
    from airflow.sdk.exceptions import AirflowFailException

    with pytest.raises(AirflowFailException, match=said):
        operator(cut, f"touch {tmp_path}/begun").execute({})
    assert not (tmp_path / "begun").exists()
