"""Whose commits a table's log holds: ours in their place, those of others, and one that came too late."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest
from deltalake import CommitProperties, Transaction, write_deltalake

from headwater.delta.commit_notes import note
from headwater.delta.delta_log import STANDS_ON
from headwater.delta.tables import current, foreign_data, is_ours, own_history, read_commit, replaced_below
from headwater.monitor.table_page import reason_of

APP = "headwater/shop/public.orders/2"


class Log:
    """A table folder with commit files alone."""

    def __init__(self, folder: Path) -> None:
        self.path = str(folder)
        (folder / "_delta_log").mkdir()
        self.newest = -1

    def commit(
        self,
        app: str | None,
        planned_on: int | None = None,
        mode: str = "Append",
        data_change: bool = True,
        because: str = "",
        named: str = "",
        stands_on: str = "",
    ) -> None:
        info: dict[str, Any] = {"operation": "WRITE", "operationParameters": {"mode": mode}}
        if planned_on is not None:
            info["userMetadata"] = note(planned_on, because)
        info |= {"txnId": named, STANDS_ON: stands_on}
        actions: list[dict[str, Any]] = [{"commitInfo": info}, {"add": {"path": "x", "dataChange": data_change}}]
        if app is not None:
            actions.append({"txn": {"appId": app, "version": 1}})
        self.newest += 1
        file = Path(self.path, "_delta_log", f"{self.newest:020d}.json")
        file.write_text("\n".join(json.dumps(action) for action in actions))

    def replaced(self, since: int | None = None) -> str:
        return replaced_below(self.path, own_history(self.path, self.newest, APP, since), self.newest)

    def problem(self, since: int | None = None) -> str:
        return foreign_data(own_history(self.path, self.newest, APP, since), APP)


@pytest.fixture
def log(tmp_path: Path) -> Log:
    """Created, written by an earlier incarnation and by a stranger, and then loaded again."""
    log = Log(tmp_path)
    log.commit("headwater/shop/public.orders/1", mode="Overwrite")
    log.commit(None)
    log.commit(APP, mode="Overwrite")
    return log


def test_what_a_load_replaced_is_of_no_interest(log: Log) -> None:
    assert log.problem() == log.problem(since=0) == ""


def test_commits_of_ours_in_their_places_are_the_logs(log: Log) -> None:
    log.commit(APP, planned_on=2)
    log.commit(APP, planned_on=3)
    assert log.problem() == log.problem(since=2) == ""


def test_rearranged_files_come_between_our_commits(log: Log) -> None:
    log.commit(None, data_change=False)
    log.commit(APP, planned_on=2)
    assert log.problem() == ""


def test_data_of_somebody_else_is_noticed_also_below_a_commit_of_ours(log: Log) -> None:
    log.commit(None)
    log.commit(APP, planned_on=3)
    assert "version 3 (WRITE) was written by another program" in log.problem()
    assert "version 3" in log.problem(since=2)


@pytest.mark.parametrize("because", ["", "a reason: of ours"])
def test_a_commit_says_beside_its_reason_what_it_was_planned_on(log: Log, because: str) -> None:
    log.commit(APP, planned_on=2, because=because)
    assert reason_of(log.path, log.newest) == (because or None)
    assert log.problem() == ""
    log.commit(APP, planned_on=2, because=because)
    assert "version 4 of an earlier driver was planned on version 2" in log.problem()


def test_a_load_that_was_overtaken_is_noticed(log: Log) -> None:
    log.commit("headwater/shop/public.orders/1", mode="Overwrite")
    assert "version 3" in log.problem()


def test_a_commit_on_top_of_one_that_it_did_not_know_is_noticed(log: Log) -> None:
    log.commit(APP, planned_on=2)
    log.commit(APP, planned_on=2)
    assert "version 4 of an earlier driver was planned on version 2" in log.problem()


def test_a_table_that_stands_where_it_stood_is_not_opened(log: Log) -> None:
    """The commits of `log` have no protocol and no metadata: no reader would open it."""
    assert current(log.path, APP, (2, 1)) == (2, 1)


@pytest.mark.parametrize("known", [(2, 2), (1, 1), (0, 1), (3, 1), None])
def test_where_a_table_stands_otherwise_its_log_says(tmp_path: Path, known: tuple[int, int] | None) -> None:
    folder = str(tmp_path / "t")
    for position in (1, 1, 1):
        properties = CommitProperties(app_transactions=[Transaction(APP, position)])
        write_deltalake(folder, pa.table({"a": [1]}), mode="append", commit_properties=properties)
    properties = CommitProperties(app_transactions=[Transaction("another", 7)])
    write_deltalake(folder, pa.table({"a": [1]}), mode="append", commit_properties=properties)
    assert current(folder, APP, known) == (3, 1)
    assert current(str(tmp_path / "nothing"), APP, known) is None


@pytest.mark.parametrize("since", [None, 3, 4, 5])
def test_a_commit_that_took_the_place_of_one_of_ours_is_found_at_a_start(log: Log, since: int | None) -> None:
    """Also where it lies just below the version that the ledger names."""
    log.commit(APP, named="a")
    log.commit(None, named="of a stranger", data_change=False)  # was ours, and called b
    log.commit(APP, named="c", stands_on="b")
    assert "version 4 (WRITE) was written by another program over" in log.replaced(since)
    assert log.problem(since) == ""


@pytest.mark.parametrize("since", [4, 5])
def test_what_clean_up_took_below_a_commit_is_not_missed(log: Log, since: int) -> None:
    for number in range(3):
        log.commit(APP, named=f"n{number}", stands_on=f"n{number - 1}")
    assert log.replaced(since) == ""
    Path(log.path, "_delta_log", f"{4:020d}.json").unlink()
    assert log.replaced(since) == ""


def test_what_a_load_stands_on_is_of_no_interest(log: Log) -> None:
    log.commit(None, named="of a stranger")
    log.commit(APP, mode="Overwrite", stands_on="b")
    log.commit(APP, named="c")
    assert log.replaced() == ""


def test_commits_of_another_job_of_the_pipeline_are_ours(log: Log) -> None:
    log.commit("headwater/shop/generation", data_change=False)
    log.commit("headwater/other/generation", data_change=False)
    commits = [read_commit(log.path, version) for version in (3, 4)]
    assert [is_ours(commit, APP) for commit in commits if commit is not None] == [True, False]
