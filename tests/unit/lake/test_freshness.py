"""The verdict on freshness: what satisfies a target, what cannot be cured by waiting, what is waited for."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta, timezone

import pendulum
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fixtures.lakes import position_at, utc
from headwater.errors import Refused
from headwater.lake.freshness import LOG_RATE, Outcome, at_deadline, hopeless, refuse_target, verdict
from headwater.lake.look import Look, ReportedState
from headwater.lake.position_file import PositionFile
from headwater.lake.requirements import AsConfigured, AtPosition, MaxStaleness, Now, Since, Target, parse_requirement
from headwater.position import Position

LOG = ("7", 1)
A, B = "public.a", "public.b"


def look(
    *,
    epoch: int = 3,
    published: int = 100,
    read: int = 200,
    pending: dict[str, int] | None = None,
    states: dict[str, str] | None = None,
    samples: tuple[tuple[str, int], ...] = (),
    rates: dict[str, float] | None = None,
) -> Look:
    file = PositionFile(
        1, epoch, position_at(lsn=published), read, "", pending or {}, samples=samples, rates=rates or {}
    )
    found = {A: "active", B: "active", **(states or {})}
    return Look(file, {name: ReportedState(state, "because") for name, state in found.items()}, LOG)


def at(lsn: int) -> Target:
    return Target(lsn, 1, "7")


@pytest.mark.parametrize(
    ("value", "requirement"),
    [
        ("now", Now()),
        (" NOW ", Now()),
        ("16/B374D848", AtPosition(0x16B374D848)),
        ("30s", MaxStaleness(30)),
        ("1.5m", MaxStaleness(90)),
        ("45", MaxStaleness(45)),
        (45, MaxStaleness(45)),
        (timedelta(minutes=2), MaxStaleness(120)),
        ("default", AsConfigured()),
        ("2023-11-14T22:13:20Z", Since(utc(0))),
        ("2023-11-14 23:13:20.5+01:00", Since(utc(0.5))),
        (utc(7).astimezone(timezone(timedelta(hours=5))), Since(utc(7))),
        (Position("7", 2, 0x10), AtPosition(0x10, 2, "7")),
        ({"lsn": "0/10", "timeline": 2, "system_id": "7"}, AtPosition(0x10, 2, "7")),
        ('{"lsn": "0/10", "timeline": 2, "system_id": "7"}', AtPosition(0x10, 2, "7")),
        ("{'lsn': '0/10', 'timeline': 2, 'system_id': '7'}", AtPosition(0x10, 2, "7")),
    ],
)
def test_a_requirement_is_now_or_a_position_or_a_duration(value: object, requirement: object) -> None:
    assert parse_requirement(value) == requirement


def test_a_moment_of_airflows_is_kept_as_a_plain_one() -> None:
    """The differences of a pendulum are no timedelta, and what looks for an older sample divides by one."""
    found = parse_requirement(pendulum.datetime(2026, 1, 2, tz="Europe/Berlin"))
    assert isinstance(found, Since)
    assert type(found.moment) is datetime
    assert found.moment == datetime(2026, 1, 1, 23, tzinfo=UTC)


@pytest.mark.parametrize("value", ["2023-11-14T22:13:20", datetime(2023, 1, 1), "2023-11-14", "2023-13-14T00:00Z"])
def test_a_moment_needs_its_time_zone(value: object) -> None:
    with pytest.raises(Refused, match="no freshness requirement"):
        parse_requirement(value)


@pytest.mark.parametrize("value", ["", "soon", "16/", "16/B374D848Z", "-3s", "{}", "{'lsn': 3}", True, None, [], "3 w"])
def test_anything_else_is_refused_as_a_requirement(value: object) -> None:
    with pytest.raises(Refused) as refused:
        parse_requirement(value)
    assert refused.value.code == "bad_requirement"


@pytest.mark.parametrize(
    ("target", "shown", "lsn"),
    [
        (100, look(), 200),  # the epoch itself reaches it
        (150, look(), 200),  # nothing of the tables lies between the epoch and what was read
        (200, look(), 200),  # read exactly up to it
        (150, look(pending={A: 160}), 159),  # the pending change lies above the target
        (150, look(pending={"public.other": 120}), 200),  # a table that nobody wants
        (159, look(pending={A: 160, B: 180}), 159),
    ],
)
def test_a_target_that_every_wanted_table_covers_is_satisfied(target: int, shown: Look, lsn: int) -> None:
    judged = verdict(at(target), shown, [A, B])
    assert (judged.outcome, judged.lsn) == (Outcome.SATISFIED, lsn)


@pytest.mark.parametrize(
    ("target", "shown", "reason"),
    [
        (201, look(), "read up to 0/C8; wanted: 0/C9"),
        (160, look(pending={A: 160}), "a change of public.a at 0/A0 has been read and is not published yet"),
        (180, look(pending={B: 160}), "a change of public.b at 0/A0"),
        (150, look(epoch=0), "no epoch has been published yet"),
        (150, Look(None, look().tables, LOG), "no epoch has been published yet"),
        (100, look(states={B: "catching up"}), "public.b is catching up: because"),
    ],
)
def test_a_target_that_a_wanted_table_does_not_cover_is_waited_for(target: int, shown: Look, reason: str) -> None:
    judged = verdict(at(target), shown, [A, B])
    assert judged.outcome is None
    assert reason in judged.reason


@pytest.mark.parametrize(
    ("state", "outcome", "exit_status"),
    [
        ("suspended", Outcome.SUSPENDED, 4),
        ("loading", Outcome.LOADING, 4),
        ("new", Outcome.NOT_REPLICATED, 2),
        ("removed", Outcome.NOT_REPLICATED, 2),
    ],
)
def test_a_table_that_waiting_cannot_help_ends_the_wait_at_once(state: str, outcome: Outcome, exit_status: int) -> None:
    # Also where the position would be reached: its versions are not those of the position.
    judged = verdict(at(100), look(states={B: state}), [A, B])
    assert (judged.outcome, outcome.exit_status) == (outcome, exit_status)
    assert B in judged.reason
    assert judged.remedy


def test_a_table_that_the_lake_does_not_know_is_not_replicated() -> None:
    assert verdict(at(100), look(), ["public.unknown"]).outcome is Outcome.NOT_REPLICATED


def test_a_lake_without_any_table_is_not_replicated() -> None:
    assert verdict(at(100), Look(None, {}), []).outcome is Outcome.NOT_REPLICATED


def test_a_suspended_table_can_be_left_out_and_is_then_named() -> None:
    shown = look(states={B: "suspended"}, pending={B: 110})
    judged = verdict(at(150), shown, [A, B], ignore_suspended=True)
    assert (judged.outcome, judged.ignored) == (Outcome.SATISFIED, (B,))
    assert verdict(at(150), shown, [B], ignore_suspended=True).outcome is Outcome.SUSPENDED


@pytest.mark.parametrize(("system_id", "timeline"), [("7", 2), ("8", 1)])
def test_a_position_of_another_log_is_never_compared(system_id: str, timeline: int) -> None:
    judged = verdict(Target(1, timeline, system_id), look(), [A])
    assert judged.outcome is Outcome.TIMELINE_CHANGED
    assert Outcome.TIMELINE_CHANGED.exit_status == 2
    assert judged.remedy.startswith("take a position from this source")
    assert "headwater replicate PIPELINE.yaml" in judged.remedy, "as with_file finds it"


def test_a_source_on_another_timeline_or_shorter_than_the_position_refuses_the_target() -> None:
    assert refuse_target(at(100), ("7", 2), 500) is not None
    future = refuse_target(at(501), LOG, 500)
    assert future is not None
    assert (future.outcome, Outcome.FUTURE_POSITION.exit_status) == (Outcome.FUTURE_POSITION, 2)
    assert refuse_target(at(500), LOG, 500) is None


def test_staleness_counts_from_the_newest_sample_that_the_tables_cover() -> None:
    shown = look(samples=((utc(10).isoformat(), 150), (utc(20).isoformat(), 200), (utc(30).isoformat(), 201)))
    limit = Target(max_staleness=15)
    assert verdict(limit, shown, [A], source_now=utc(35)).outcome is Outcome.SATISFIED
    late = verdict(limit, shown, [A], source_now=utc(36))
    assert late.outcome is None
    assert "16.0 s ago" in late.reason


def test_a_pending_change_makes_a_table_as_stale_as_the_moment_before_it() -> None:
    shown = look(pending={A: 160}, samples=((utc(10).isoformat(), 150), (utc(20).isoformat(), 200)))
    limit = Target(max_staleness=15)
    assert verdict(limit, shown, [A], source_now=utc(30)).outcome is None
    assert verdict(limit, shown, [B], source_now=utc(30)).outcome is Outcome.SATISFIED


def test_an_idle_source_is_fresh_by_a_sample_of_ones_own() -> None:
    shown = look(samples=((utc(10).isoformat(), 150),))
    assert verdict(Target(max_staleness=1), shown, [A], source_now=utc(900)).outcome is None
    own = [(utc(900), 200)]
    assert verdict(Target(max_staleness=1), shown, [A], source_now=utc(900), samples=own).outcome is Outcome.SATISFIED


def test_what_was_sampled_before_the_clock_was_set_back_tells_nothing_of_now() -> None:
    # At 100 s the clock was set back to 50 s; since then a commit at 130 was read, which is not in the lake yet.
    shown = look(published=120, read=130, pending={A: 130}, samples=((utc(100).isoformat(), 120),))
    limit = Target(max_staleness=5)
    assert verdict(limit, shown, [A], source_now=utc(60)).outcome is None
    assert verdict(limit, shown, [A], source_now=utc(60), samples=[(utc(58), 130)]).outcome is None
    assert verdict(limit, shown, [A], source_now=utc(60), samples=[(utc(58), 125)]).outcome is Outcome.SATISFIED
    assert verdict(limit, shown, [A], source_now=utc(102)).outcome is Outcome.SATISFIED
    # The other way round the clock would have to have been set back just now.
    assert verdict(limit, shown, [A], source_now=utc(99.5)).outcome is Outcome.SATISFIED


def test_staleness_is_not_judged_without_the_sources_clock() -> None:
    shown = look(samples=((utc(10).isoformat(), 150),))
    assert verdict(Target(max_staleness=1e9), shown, [A]).outcome is None


def test_the_time_still_to_wait_comes_from_the_rate_of_the_log_when_there_is_one() -> None:
    assert verdict(at(300), look(rates={LOG_RATE: 50.0}), [A]).eta_seconds == 2.0
    assert verdict(at(300), look(), [A]).eta_seconds is None
    assert verdict(at(300), look(pending={A: 101}), [A, B]).tables[A].gap_bytes == 200


def test_a_deadline_ends_as_timed_out_only_when_a_driver_was_seen() -> None:
    waiting = verdict(at(300), look(), [A])
    assert at_deadline(waiting, alive=True, stopped="", pipeline_file="p.yaml").outcome is Outcome.TIMED_OUT
    gone = at_deadline(
        waiting, alive=False, stopped="replication is stopped, no driver since 12:03 UTC", pipeline_file="p.yaml"
    )
    assert gone.outcome is Outcome.NOT_RUNNING
    assert gone.remedy == "headwater replicate p.yaml"
    assert gone.reason.startswith("replication is stopped, no driver since 12:03 UTC; ")


def test_a_target_survives_being_stored() -> None:
    mixed = Target(5, 1, "7", by_table={A: 60.0})
    for target in (at(0x16B374D848), Target(max_staleness=30.0), Target(5), Target(since=utc(1.5)), mixed):
        assert Target.from_json(target.to_json()) == target


def test_a_moment_lies_at_the_lowest_sample_that_was_taken_at_or_after_it() -> None:
    moment = Target(since=utc(10))
    early, late = [(utc(9.9), 100), (utc(8), 90)], [(utc(30), 300), (utc(10), 150), (utc(20), 200)]
    assert moment.resolved(early, LOG) == moment
    assert moment.resolved(early + late, None) == moment  # of which log, nobody knows
    found = moment.resolved(early + late, LOG)
    assert (found.lsn, found.log, found.since) == (150, LOG, utc(10))
    assert found.resolved([(utc(10), 120)], LOG) == found  # once pinned it stays


def test_a_moment_that_no_sample_has_reached_is_waited_for_and_then_judged_by_its_position() -> None:
    moment = Target(since=utc(10))
    judged = verdict(moment, look(samples=((utc(9).isoformat(), 90),)), [A])
    assert judged.outcome is None
    assert "not known to have reached 2023-11-14T22:13:30Z" in judged.reason
    assert verdict(moment.resolved([(utc(10), 200)], LOG), look(), [A]).outcome is Outcome.SATISFIED
    assert verdict(moment.resolved([(utc(10), 201)], LOG), look(), [A]).outcome is None


def test_each_table_goes_by_its_own_staleness_and_the_others_by_the_position() -> None:
    shown = look(pending={A: 160}, samples=((utc(10).isoformat(), 150), (utc(20).isoformat(), 200)))
    assert verdict(Target(200, 1, "7"), shown, [A, B], source_now=utc(30)).outcome is None
    mixed = Target(200, 1, "7", by_table={A: 20.0})
    assert verdict(mixed, shown, [A, B], source_now=utc(30)).outcome is Outcome.SATISFIED
    assert verdict(mixed, shown, [A, B], source_now=utc(30)).tables[A].gap_bytes is None
    stale = verdict(mixed, shown, [A, B], source_now=utc(31))
    assert (stale.outcome, stale.reason) == (None, "public.a is known complete up to 21.0 s ago; wanted: 20 s")
    short = verdict(Target(201, 1, "7", by_table={A: 20.0}), shown, [A, B], source_now=utc(30))
    assert (short.outcome, short.tables[B].gap_bytes) == (None, 1)
    both = Target(by_table={A: 20.0, B: 10.0})
    assert verdict(both, shown, [A, B], source_now=utc(30)).outcome is Outcome.SATISFIED
    assert "public.b is known complete up to 11.0 s ago" in verdict(both, shown, [B], source_now=utc(31)).reason


def test_a_wait_is_given_up_as_soon_as_the_estimate_exceeds_what_is_left() -> None:
    waiting = verdict(at(300), look(rates={LOG_RATE: 50.0}), [A])
    assert hopeless(waiting, 2.0) == waiting
    given_up = hopeless(waiting, 1.9)
    assert given_up.outcome is Outcome.TIMED_OUT
    assert "about 2.0 s, and 1.9 s are left" in given_up.reason
    unknown = verdict(at(300), look(), [A])
    assert hopeless(unknown, 0.1) == unknown


lsns = st.integers(1, 40)


@st.composite
def histories(draw: st.DrawFn) -> tuple[dict[str, list[int]], int, int]:
    """Commit LSNs of each table, the newest epoch's position, and how far the log was read (at or above it)."""
    commits = {name: sorted(draw(st.sets(lsns, max_size=8))) for name in (A, B)}
    published = draw(lsns)
    return commits, published, draw(st.integers(published, 41))


@given(histories(), lsns, st.sampled_from([[A], [B], [A, B]]))
def test_satisfied_means_that_no_commit_up_to_the_target_is_missing_and_the_position_is_exact(
    history: tuple[dict[str, list[int]], int, int], target: int, wanted: list[str]
) -> None:
    commits, published, read = history
    unpublished = {name: [lsn for lsn in done if published < lsn] for name, done in commits.items()}
    pending = {name: lsns[0] for name, lsns in unpublished.items() if lsns and lsns[0] <= read}
    judged = verdict(at(target), look(published=published, read=read, pending=pending), wanted)
    missing = [lsn for name in wanted for lsn in unpublished[name]]
    complete = read >= target and not any(lsn <= target for lsn in missing)
    assert (judged.outcome is Outcome.SATISFIED) == complete
    if complete:
        # The cut's position: at or above the target, and no commit at or below it is missing from the versions.
        assert judged.lsn >= target
        assert not any(lsn <= judged.lsn for lsn in missing)
        assert judged.lsn == read or any(lsn == judged.lsn + 1 for lsn in missing)
