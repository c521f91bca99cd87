"""One sentence on a pipeline: which level holds where several might, and what the sentence says."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from fixtures.lakes import position_at
from headwater.lake.health import LATE_SECONDS, Facts, Health, SlotRoom, health, moment_text
from headwater.lake.look import Look, ReportedState
from headwater.lake.position_file import PositionFile

NOW = datetime(2026, 3, 1, 12, 17, tzinfo=UTC)
STOPPED = NOW - timedelta(minutes=14)
GIB = 1 << 30
AS_OF = "the lake holds everything up to 2026-03-01 12:02:57 UTC"
SILENT = "the source does not answer: connection refused"


def table(state: str = "active", lag: float | None = 0.4, allowed: float | None = None, **more: Any) -> dict[str, Any]:
    return {
        "state": state,
        "reason": "",
        "remedy": "",
        "retrying": None,
        "lag_seconds": lag,
        "freshness_seconds": allowed,
        **more,
    }


SUSPENDED = table("suspended", reason="the column amount is now text", remedy="headwater reload shop.yaml --table a")


def of(tables: dict[str, dict[str, Any]], *, paused: str = "", published: bool = True, **facts: Any) -> Health:
    samples = (((STOPPED - timedelta(seconds=3)).isoformat(), 0x100),)
    file = PositionFile(1, 7, position_at(lsn=0x100), 0x180, STOPPED.isoformat(), samples=samples)
    states = {name: ReportedState(one["state"]) for name, one in tables.items()}
    look = Look(file if published else None, states, ("7", 1), paused)
    return health(Facts(look=look, tables=tables, file="shop.yaml", now=NOW, **{"running": True, **facts}))


def test_a_lake_that_keeps_up_says_so_and_how_closely() -> None:
    assert of({"a": table(), "b": table(lag=0.0)}) == Health(
        "ok", "Up to date: 2 tables, less than 1 s behind the source."
    )
    assert of({"a": table(lag=42.0)}).sentence == "Up to date: 1 table, at most 42 s behind the source."


def test_without_a_driver_it_is_stopped_and_says_since_when() -> None:
    found = of({"a": table(lag=0.0), "b": SUSPENDED}, running=False, outage="connection refused")
    assert (found.level, found.remedy) == ("stopped", "headwater doctor shop.yaml"), "a driver would end again"
    assert of({"a": table(lag=0.0)}, running=False).remedy == "headwater replicate shop.yaml"
    assert found.sentence == (
        f"Stopped: no driver since 12:03 UTC (14 min ago); {AS_OF}; the source does not answer; b is suspended."
    )
    assert of({"a": table("catching up", lag=None)}, running=False, published=False).sentence == (
        "Stopped: no driver has replicated yet."
    )


def test_what_was_never_loaded_is_no_lake_that_is_up_to_date() -> None:
    assert of({"a": table("new", lag=None)}, published=False, running=False) == Health(
        "stopped", "Stopped: no table is loaded yet.", "headwater load shop.yaml"
    )


FIRST = {"a": table("loading", lag=None), "b": table("catching up", lag=None), "c": table("new", lag=None)}


@pytest.mark.parametrize(
    ("load_lives", "expected"),
    [
        (True, Health("late", "Loading: 1 of 3 tables are loaded.")),
        (
            False,
            Health(
                "stopped",
                "Stopped: a load ended before it was done; 1 of 3 tables are loaded.",
                "headwater load shop.yaml",
            ),
        ),
        (None, Health("stopped", "Stopped: no driver has replicated yet.", "headwater replicate shop.yaml")),
    ],
)
def test_a_first_load_is_one_as_long_as_it_lives(load_lives: bool | None, expected: Health) -> None:
    assert of(FIRST, published=False, running=False, load_lives=load_lives) == expected


@pytest.mark.parametrize("running", [True, False, None])
def test_a_pipeline_whose_tables_all_left_its_file_has_nothing_to_replicate(running: bool | None) -> None:
    found = of({"a": table("removed", lag=None), "b": table("new", lag=None)}, running=running)
    assert found == Health("stopped", "Stopped: no table is loaded.", "headwater load shop.yaml")


def test_a_load_that_has_only_begun_is_one() -> None:
    tables = {"a": table("new", lag=None), "b": table("new", lag=None)}
    assert of(tables, published=False, running=False, load_lives=True).sentence == "Loading: 0 of 2 tables are loaded."


def test_a_load_that_ended_beside_a_driver_is_begun_again_by_a_person() -> None:
    tables = {"a": table("loading", lag=None), "b": table()}
    assert of(tables, load_lives=True).level == "late"
    found = of(tables, load_lives=False)
    assert found == Health("degraded", "Degraded: the load of a ended before it was done.", "headwater load shop.yaml")


def test_where_all_tables_are_suspended_a_driver_is_no_cure() -> None:
    found = of({"a": SUSPENDED, "b": SUSPENDED}, running=False)
    assert (found.level, found.remedy, found.table) == ("stopped", SUSPENDED["remedy"], None)
    assert found.sentence.endswith("; every table is suspended: the column amount is now text.")
    assert of({"a": SUSPENDED}, running=False).table == "a"


def test_a_file_made_up_from_the_ledger_says_no_time() -> None:
    file = PositionFile(1, 7, position_at(lsn=0x100), 0x180, "")
    look = Look(file, {"a": ReportedState("active")}, ("7", 1))
    found = health(Facts(look=look, tables={"a": table()}, file="shop.yaml", now=NOW, running=False))
    assert found.sentence == "Stopped: no driver runs."


def test_a_suspension_without_a_reason_is_a_sentence() -> None:
    assert of({"a": table("suspended"), "b": table()}).sentence == "Degraded: a is suspended."


def test_a_pause_is_a_persons_and_comes_first() -> None:
    found = of({"a": table(lag=900.0), "b": SUSPENDED}, paused="2026-02-28T23:00:00Z", running=False)
    assert (found.level, found.remedy) == ("paused", "headwater resume shop.yaml")
    assert found.sentence.startswith("Paused since 2026-02-28 23:00 UTC (13 h 17 min ago): no driver replicates")


@pytest.mark.parametrize(
    ("tables", "facts", "sentence", "remedy", "name"),
    [
        (
            {"a": SUSPENDED, "b": table()},
            {},
            "Degraded: a is suspended: the column amount is now text.",
            SUSPENDED["remedy"],
            "a",
        ),
        (
            {"a": SUSPENDED, "b": SUSPENDED, "c": table()},
            {},
            "Degraded: 2 of 3 tables are suspended, among them a: the column amount is now text.",
            SUSPENDED["remedy"],
            "a",
        ),
        (
            {"a": table(lag=None)},
            {"outage": SILENT},
            f"Degraded: {SILENT}; the driver tries again; {AS_OF}.",
            "headwater doctor shop.yaml",
            None,
        ),
        (
            {"a": table(lag=None)},
            {"outage": SILENT, "running": None},
            f"Degraded: {SILENT}; whether a driver lives is not known yet; {AS_OF}.",
            "headwater doctor shop.yaml",
            None,
        ),
        (
            {"a": table(retrying={"since": STOPPED.isoformat(), "attempts": 3, "reason": "no space is left"})},
            {},
            "Degraded: a has failed since 12:03 UTC (14 min ago) and is tried again: no space is left.",
            "headwater doctor shop.yaml",
            "a",
        ),
        (
            {"a": table()},
            {"room": SlotRoom(12 * GIB, 20 * GIB)},
            "Degraded: the source keeps 12.0 GiB of its log; past 20.0 GiB the slot is given up.",
            "headwater doctor shop.yaml",
            None,
        ),
    ],
)
def test_what_needs_a_look_is_named(
    tables: dict[str, dict[str, Any]], facts: dict[str, Any], sentence: str, remedy: str, name: str | None
) -> None:
    assert of(tables, **facts) == Health("degraded", sentence, remedy, name)


def test_log_that_is_far_from_its_bound_degrades_nothing() -> None:
    assert of({"a": table()}, room=SlotRoom(9 * GIB, 20 * GIB)).level == "ok"
    assert of({"a": table()}, room=SlotRoom(900 * GIB)).level == "ok"


def test_late_is_what_the_file_says_or_a_minute() -> None:
    assert of({"a": table(lag=LATE_SECONDS)}).level == "ok"
    assert of({"a": table(lag=LATE_SECONDS + 1)}).level == "late"
    assert of({"a": table(lag=95.0, allowed=600.0)}).level == "ok"
    found = of({"a": table(lag=95.0, allowed=60.0), "b": table(lag=70.0, allowed=5.0), "c": table()}, eta_seconds=42.0)
    assert found == Health(
        "late",
        "Late: b is 1 min behind the source, 5 s are allowed, about 42 s to go; 2 of 3 tables are late.",
        "headwater status shop.yaml --verbose",
        "b",
    )


def test_tables_that_are_not_in_step_yet_make_it_late() -> None:
    assert of({"a": table("catching up", lag=3.0), "b": table()}, eta_seconds=7.0).sentence == (
        "Late: a is catching up, about 7 s to go."
    )
    assert of({"a": table("loading", lag=None), "b": table("loading", lag=None), "c": table()}).sentence == (
        "Late: 2 of 3 tables are loading."
    )
    assert of({"a": table(lag=None), "b": table()}).sentence == "Late: how far a is behind is not known yet."


def test_a_table_that_the_file_names_and_nobody_has_loaded_is_said() -> None:
    new = table("new", lag=None)
    assert of({"a": table(), "b": new}, named={"a", "b"}) == Health(
        "late", "Late: b is in the pipeline file and not loaded.", "headwater load shop.yaml", "b"
    )
    several = of({"a": table(lag=None), "b": new, "c": new}, named={"a", "b", "c"})
    assert several.sentence == "Late: 2 tables are in the pipeline file and not loaded."
    assert of({"a": table("catching up"), "b": new}, named={"a", "b"}).sentence == "Late: a is catching up."
    assert of({"a": table(), "b": new}, named={"a"}).level == "ok", "a pattern matches it"


def test_a_moment_has_its_day_where_that_is_another_one() -> None:
    assert moment_text("2026-03-01T12:16:30Z", NOW) == "12:16 UTC"
    assert moment_text("2026-03-01T14:03:00+02:00", NOW) == "12:03 UTC (14 min ago)"
    assert moment_text("2026-02-26T10:17:00Z", NOW) == "2026-02-26 10:17 UTC (3 d 2 h ago)"
