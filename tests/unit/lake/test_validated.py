"""Waits for a validated cut, on a lake driven by hand: never early, and the reason says what is missing."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from threading import Event
from typing import Any

import pytest
import yaml

from fixtures.lake_waits import request, waiter
from fixtures.lakes import HandLake, position_at, utc
from headwater.delta import storage
from headwater.errors import Refused
from headwater.lake import validations
from headwater.lake.cuts import list_pins
from headwater.lake.freshness import Outcome, Verdict, verdict
from headwater.lake.ledger import last_sample
from headwater.lake.look import Look
from headwater.lake.paths import validations_path
from headwater.lake.reader import LakeReader
from headwater.lake.requirements import AtPosition, Target
from headwater.lake.validated import ValidatedEpoch, judged_by_validation
from headwater.lake.validations import SuiteResult, TableResult, Validation, ValidationReader
from headwater.maintain.control_tables import keep_validations
from headwater.names import TableName
from headwater.pipeline_file.pipeline import Pipeline, load_pipeline
from headwater.waiting.on_timeout import instead_of_cut
from headwater.waiting.request import WaitRequest
from headwater.waiting.result import WaitResult
from headwater.waiting.wait import wait_for_cut
from headwater.waiting.waiter import Waiter

A, B = "public.a", "public.b"
# Nobody listens there: what these tests wait for, they must find in the lake alone.
NOWHERE = "postgresql://reader@127.0.0.1:1/shop"


@pytest.fixture
def lake(tmp_path: Path) -> HandLake:
    lake = HandLake(tmp_path / "lake", position_at(lsn=0x100), [A, B])
    lake.publish(0x200, A, sample=(utc(0), 0x180))
    return lake


def pipeline_of(lake: HandLake, **defaults: Any) -> Pipeline:
    file = Path(lake.root).parent / "shop.yaml"
    document: dict[str, Any] = {
        "pipeline": "shop",
        "source": {"connection": NOWHERE},
        "lake": {"root": Path(lake.root).as_uri()},
        "tables": [A, {"name": B, **defaults.pop(B, {})}],
        "defaults": defaults,
    }
    file.write_text(yaml.safe_dump(document))
    return load_pipeline(file)


def validated(
    lake: HandLake,
    *tables: str,
    epoch: int | None = None,
    failed: str = "",
    lsn: int | None = None,
    incarnation: int = 0,
    kept: float = 3600.0,
) -> None:
    """A validation of `tables` at `epoch` (the newest); `failed` did not meet what is expected of it."""
    newest = lake.ledger.newest
    assert newest is not None
    now = datetime.now(UTC)
    results = [
        TableResult(
            name,
            incarnation,
            lake.versions[name].version,
            10,
            [
                SuiteResult("basics", 3, 0, 0, None, passed=["1"]),
                SuiteResult(
                    "rules",
                    2,
                    int(name == failed),
                    0,
                    "error" if name == failed else None,
                    [{"expectation": "expect_it", "columns": ["n"], "severity": "error", "keys": [{"id": 4711}]}]
                    if name == failed
                    else [],
                ),
            ],
        )
        for name in tables
    ]
    position = lake.position if lsn is None else lake.position.at(lsn)
    number = newest.epoch if epoch is None else epoch
    sample = last_sample(lake.root, position)
    run = Validation(
        f"{now.timestamp()}", "shop", number, position, sample, results, now, now, now + timedelta(seconds=kept), "1.24"
    )
    validations.record(lake.root, run)


def look(lake: HandLake, lsn: int, *tables: str, timeout: float = 0.0, **options: Any) -> WaitResult | None:
    requirement = options.pop("requirement", AtPosition(lsn, 1, "7"))
    names = [TableName.parse(name) for name in tables]
    return waiter(pipeline_of(lake), requirement, timeout=timeout, tables=names, **{"validated": True} | options).look()


def ended(lake: HandLake, lsn: int, *tables: str, **options: Any) -> WaitResult:
    result = look(lake, lsn, *tables, **options)
    assert result is not None
    return result


def test_a_validated_cut_at_or_above_the_target_is_handed_on_though_newer_epochs_are_there(lake: HandLake) -> None:
    validated(lake, A, B)
    lake.publish(0x300, A)
    assert lake.file is not None
    result = ended(lake, 0x200)
    assert result.outcome is Outcome.SATISFIED
    cut = result.to_json()
    assert (cut["epoch"], cut["position"]["lsn"], cut["validated"]) == (1, "0/200", [A, B])
    assert cut["tables"][A]["version"] == 1
    assert [pin.cut for pin in list_pins(lake.root)] == [result.cut]
    plain = ended(lake, 0x200, validated=False).to_json()
    assert (plain["epoch"], "validated" in plain) == (2, False)


def test_a_wait_that_began_before_anybody_had_answered_learns_what_it_is_for(lake: HandLake) -> None:
    validated(lake, A, B)
    lake.publish(0x300, A)
    begun = request(AtPosition(0x200, 1, "7"), validated=True).unseen()
    assert begun is not None
    waiting = Waiter(pipeline_of(lake), WaitRequest.from_json(json.loads(json.dumps(begun.to_json()))))
    result = waiting.look()
    assert (result is not None and result.cut is not None and result.cut["epoch"]) == 1
    assert waiting.target == Target(0x200, 1, "7", validated=(A, B))


def test_an_epoch_is_on_disk_before_its_validation_is_recorded(lake: HandLake, monkeypatch: pytest.MonkeyPatch) -> None:
    """A power cut that takes the epoch alone would give its number to another, which nobody has validated."""
    recorded: list[bool] = []
    monkeypatch.setattr(storage, "sync", lambda root: recorded.append(Path(validations_path(root)).exists()))
    validated(lake, A, B)
    assert recorded == [False]
    assert Path(validations_path(lake.root)).exists()


def test_fresh_and_never_validated_is_no_success(lake: HandLake) -> None:
    assert look(lake, 0x200, timeout=60) is None
    result = ended(lake, 0x200)
    assert (result.outcome, result.exit_status) == (Outcome.NOT_VALIDATED, 3)
    assert result.verdict.reason == "fresh, but not yet validated: there is no validation yet"
    assert "headwater validate" in result.verdict.remedy
    assert list_pins(lake.root) == []


def test_validated_below_the_target_is_no_success(lake: HandLake) -> None:
    validated(lake, A, B)
    lake.publish(0x300, A)
    result = ended(lake, 0x201)
    assert result.outcome is Outcome.NOT_VALIDATED
    assert "the newest one that passed is of epoch 1 at 0/200, too old for the target" in result.verdict.reason


def test_not_fresh_is_told_as_ever_whatever_is_validated(lake: HandLake) -> None:
    validated(lake, A, B)
    result = ended(lake, 0x201)
    assert result.outcome is Outcome.NOT_RUNNING
    assert "not yet validated" not in result.verdict.reason


def test_a_failed_validation_is_no_success_for_the_table_that_failed_alone(lake: HandLake) -> None:
    validated(lake, A, B, failed=B)
    result = ended(lake, 0x200)
    assert result.outcome is Outcome.NOT_VALIDATED
    assert "the newest validation is of epoch 1 at 0/200, and public.b failed expect_it" in result.verdict.reason
    assert ended(lake, 0x200, A).outcome is Outcome.SATISFIED
    # Looked at again, it passes, or fails: the newest result of an epoch counts.
    validated(lake, A, B)
    assert ended(lake, 0x200).outcome is Outcome.SATISFIED
    validated(lake, A, B, failed=A)
    assert ended(lake, 0x200).outcome is Outcome.NOT_VALIDATED


def test_an_epoch_that_failed_behind_a_success_stays_failed_when_a_newer_one_is_validated(lake: HandLake) -> None:
    validated(lake, A)
    assert ended(lake, 0x200, A).outcome is Outcome.SATISFIED
    validated(lake, A, failed=A)
    lake.publish(0x300, A)
    validated(lake, A, failed=A)
    assert {one.epoch: one.tables[A].success for one in ValidationReader(lake.root).look()} == {1: False, 2: False}
    assert ended(lake, 0x200, A).outcome is Outcome.NOT_VALIDATED


def test_every_wanted_table_must_have_been_validated_at_one_epoch(lake: HandLake) -> None:
    validated(lake, A)
    lake.publish(0x300, B)
    validated(lake, B)
    result = ended(lake, 0x100)
    assert result.outcome is Outcome.NOT_VALIDATED
    assert "public.a was not validated there" in result.verdict.reason
    validated(lake, A)
    assert ended(lake, 0x100).to_json()["epoch"] == 2


def test_what_was_loaded_anew_since_must_be_validated_anew(lake: HandLake) -> None:
    validated(lake, A, B)
    lake.registry.change(A, lambda record: replace(record, incarnation=1))
    result = ended(lake, 0x200)
    assert result.outcome is Outcome.NOT_VALIDATED
    assert "public.a was loaded again since" in result.verdict.reason


def test_a_position_is_exact_for_tables_that_nobody_validated_only_up_to_the_epochs_own(lake: HandLake) -> None:
    lake.read_to(0x280)
    validated(lake, A, lsn=0x280)
    assert ended(lake, 0x280, A).outcome is Outcome.SATISFIED
    both = Target(0x280, 1, "7", validated=(A,))
    assert ended(lake, 0, requirement=both, validated=False).outcome is Outcome.NOT_VALIDATED
    lower = ended(lake, 0, requirement=Target(0x200, 1, "7", validated=(A,)), validated=False)
    assert lower.to_json()["position"]["lsn"] == "0/200"


def test_a_table_that_was_suspended_at_a_validated_epoch_is_not_in_step_there(lake: HandLake) -> None:
    """Whatever it is now, and though nobody has to validate it: its rows are older than the epoch's position."""
    validated(lake, A)
    lake.enter(B, "suspended", "why")
    lake.succeed(B)
    lake.publish(0x300, A)
    validated(lake, A)
    lake.enter(B, "active")
    lake.publish(0x400, B)
    options: dict[str, Any] = {"validated": False, "ignore_suspended": True}
    late = ended(lake, 0, requirement=Target(0x300, 1, "7", validated=(A,)), **options)
    assert late.outcome is Outcome.NOT_VALIDATED
    assert "is of epoch 2 at 0/300, where public.b was suspended" in late.verdict.reason
    # An older one is handed on if it is enough, and the same one to who does not want that table.
    assert ended(lake, 0, requirement=Target(0x200, 1, "7", validated=(A,)), **options).to_json()["epoch"] == 1
    assert ended(lake, 0x300, A).to_json()["epoch"] == 2


def test_a_table_that_nobody_validates_counts_as_it_is_loaded_now(lake: HandLake) -> None:
    validated(lake, A)
    lake.publish(0x300, A, B)
    lake.registry.change(B, lambda record: replace(record, incarnation=1, start_lsn=0x280))
    options: dict[str, Any] = {"requirement": Target(0x200, 1, "7", validated=(A,)), "validated": False}
    late = ended(lake, 0, **options)
    assert late.outcome is Outcome.NOT_VALIDATED
    assert "is of epoch 1 at 0/200, and public.b was loaded again since" in late.verdict.reason
    validated(lake, A)
    assert ended(lake, 0, **options).to_json()["epoch"] == 2


def test_a_table_that_a_validated_epoch_does_not_hold_is_not_in_step_there(lake: HandLake) -> None:
    version = lake.versions.pop(B)
    lake.succeed()
    lake.publish(0x300, A)
    validated(lake, A)
    lake.versions[B] = version
    lake.publish(0x400, B)
    late = ended(lake, 0, requirement=Target(0x300, 1, "7", validated=(A,)), validated=False)
    assert late.outcome is Outcome.NOT_VALIDATED
    assert "where public.b was missing" in late.verdict.reason


def test_a_suspended_table_that_is_left_out_needs_no_validation(lake: HandLake) -> None:
    lake.enter(B, "suspended", "why")
    target = Target(0x200, 1, "7", validated=(B,))
    options: dict[str, Any] = {"requirement": target, "validated": False, "ignore_suspended": True}
    assert ended(lake, 0, **options).outcome is Outcome.SATISFIED
    both = ended(lake, 0, **options | {"requirement": Target(0x200, 1, "7", validated=(A, B))})
    assert both.outcome is Outcome.NOT_VALIDATED
    validated(lake, A)
    assert ended(lake, 0x200, ignore_suspended=True).outcome is Outcome.SATISFIED


def test_another_log_is_never_mistaken_for_this_one(lake: HandLake) -> None:
    lake.position = position_at("8", 1, 0x900)
    validated(lake, A, B)
    lake.position = position_at("7", 1, 0x200)
    assert ended(lake, 0x200).outcome is Outcome.NOT_VALIDATED


def test_the_target_carries_what_must_be_validated_to_another_process(lake: HandLake) -> None:
    target = Target(0x200, 1, "7", validated=(A, B))
    restored = Target.from_json(json.loads(json.dumps(target.to_json())))
    assert (restored, str(restored)) == (target, "0/200, validated")
    assert ended(lake, 0, requirement=restored, validated=False).outcome is Outcome.NOT_VALIDATED


def test_the_pipeline_file_says_by_default_what_must_be_validated(lake: HandLake) -> None:
    pipeline = pipeline_of(lake, validated=True, **{B: {"validated": False}})
    assert [pipeline.validated(TableName.parse(name)) for name in (A, B)] == [True, False]
    assert not pipeline_of(lake).validated(TableName.parse(A))


def test_staleness_is_that_of_the_validated_cut(lake: HandLake) -> None:
    """The sample of the validation outlives those of the position file."""
    validated(lake, A, B)
    lake.publish(0x300, A, sample=(utc(500), 0x300))
    known = ValidationReader(lake.root).look()
    assert known[0].tables[A].sample == (utc(0), 0x180)
    reader = LakeReader(lake.root, "shop")
    shown = reader.look()

    def outcome(limit: float, known: list[ValidatedEpoch]) -> Outcome | None:
        def judge(look: Look, samples: Sequence[tuple[datetime, int]] = ()) -> Verdict:
            return verdict(Target(max_staleness=limit), look, [A, B], source_now=utc(510), samples=samples)

        judged = judged_by_validation(judge(shown), shown, [A, B], known, lake.registry.tables, judge, reader.epoch)
        assert judged.awaits_validation == (judged.outcome is None)
        return judged.outcome

    assert outcome(20, known) is None
    assert outcome(509, known) is None
    assert outcome(511, known) is Outcome.SATISFIED
    assert outcome(511, []) is None


def test_the_source_is_no_way_around_a_validation(lake: HandLake) -> None:
    with pytest.raises(Refused, match="exclude each other"):
        wait_for_cut(pipeline_of(lake), validated=True, on_timeout="fallback")
    late = ended(lake, 0x900).to_json()
    assert late["validated"] == [A, B]
    assert instead_of_cut(pipeline_of(lake), late, "fallback", request()) is None
    del late["validated"]
    assert instead_of_cut(pipeline_of(lake), late, "fallback", request()) is not None


def test_a_reader_asks_only_for_what_may_still_be_handed_on(lake: HandLake) -> None:
    reader = ValidationReader(lake.root)
    assert reader.look() == []
    validated(lake, A, kept=-1)
    lake.publish(0x300, A)
    validated(lake, A, kept=-1)
    assert [found.epoch for found in reader.look()] == [2]
    validated(lake, A, epoch=1)
    assert [found.epoch for found in reader.look()] == [2, 1]


def test_the_table_of_validations_stays_few_files(lake: HandLake) -> None:
    assert keep_validations(lake.root, Event()) is None
    for _ in range(12):
        validated(lake, A, B)
    kept = keep_validations(lake.root, Event(), keep=0, enough=10)
    assert kept is not None
    assert (kept.files_before, kept.files_after) == (12, 1)
    assert len(list(Path(validations_path(lake.root)).glob("*.parquet"))) == 1
    assert [found.epoch for found in ValidationReader(lake.root).look()] == [1]


def test_a_page_tells_what_failed_and_no_key(lake: HandLake) -> None:
    assert validations.recent_results(lake.root, A) == []
    validated(lake, A, B)
    lake.publish(0x300, A)
    validated(lake, A, failed=A)
    found = validations.recent_results(lake.root, A)
    assert [(one["epoch"], one["suite"], one["success"]) for one in found] == [
        (2, "basics", True),
        (2, "rules", False),
        (1, "basics", True),
        (1, "rules", True),
    ]
    assert found[1]["failed"] == [{"expectation": "expect_it", "columns": ["n"], "severity": "error"}]
    assert "4711" not in json.dumps(found)
    assert validations.recent_results(lake.root, "public.o'brien") == []


def test_of_validations_no_more_is_read_than_is_shown(lake: HandLake, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(14):
        lake.publish(0x300 + number, A)
        validated(lake, A, failed=A if number > 10 else "")
    opened, parquet_file = 0, storage.parquet_file

    def counted(place: str) -> Any:
        nonlocal opened
        opened += 1
        return parquet_file(place)

    monkeypatch.setattr(storage, "parquet_file", counted)
    shown = validations.recent_results(lake.root, A, most=6)
    assert ([one["epoch"] for one in shown], opened) == ([15, 15, 14, 14, 13, 13], 3)
    assert validations.earlier(lake.root, A) is not None
    assert opened == 4
    passed = validations.earlier(lake.root, A, passed_only=True)
    assert passed is not None
    assert (passed.epoch, opened) == (12, 8)
