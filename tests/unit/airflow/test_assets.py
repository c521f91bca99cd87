"""Assets as a DAG file makes them: what they refuse, and which of them are one and the same."""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from fixtures.pages import page_pipeline

if TYPE_CHECKING:
    from airflow.sdk import Asset
    from airflow.triggers.base import BaseEventTrigger

KINDS = ["moved", "fresh", "late"]

pytestmark = pytest.mark.usefixtures("airflow_home")


@pytest.fixture
def file(tmp_path: Path) -> Path:
    logs = {"name": "public.log_*", "exclude": ["public.log_old"]}
    return page_pipeline(tmp_path, "shop", "public.a", logs, defaults={"freshness": "60s"})


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["public.typo", "public.log_old"])
def test_an_event_of_a_table_that_the_file_does_not_replicate_is_refused(kind: str, file: Path, name: str) -> None:
    """It would never come."""
    assert "public.a, public.log_2026" in asset_of(kind, file, tables=["public.log_2026", "Public.A"]).name
    with pytest.raises(ValueError, match=rf"replicates no table {name}"):
        asset_of(kind, file, tables=["public.a", name])


@pytest.mark.parametrize("kind", KINDS)
def test_one_table_as_a_text_is_refused_and_not_taken_for_its_letters(kind: str, file: Path) -> None:
    with pytest.raises(ValueError, match=r"tables='public\.a': expected a list of names"):
        asset_of(kind, file, tables="public.a")


@pytest.mark.parametrize(
    ("cron", "why"),
    [
        ("every day", "is no cron expression"),
        ("H 6 * * *", "is no cron expression"),
        ("R(0-30) 6 * * *", "is no cron expression"),  # other moments at each look
        ("0 0 30 2 *", "never comes"),
        ("0 0 31 4,6 *", "never comes"),
    ],
)
def test_moments_that_never_come_or_are_none_are_refused(file: Path, cron: str, why: str) -> None:
    from headwater_airflow.assets import fresh

    with pytest.raises(ValueError, match=why):
        fresh(file, cron)
    # The last one is over, which no DAG file is to fail for.
    for known in ("0 0 29 2 *", "*/5 * * * * *", "0 6 1 mar-apr fri", "@hourly", "0 6 1 1 * 0 2025"):
        fresh(file, known)


def test_a_time_zone_is_looked_up_and_not_searched_for_among_all(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Airflow reads a DAG file again and again, and there are six hundred of them."""
    from headwater_airflow.assets import fresh

    monkeypatch.setattr(os, "walk", None)
    for unknown in ("Mars/Base", "Europe", "../UTC", "/etc/localtime", "", "a\0b"):
        with pytest.raises(ValueError, match="is no time zone"):
            fresh(file, "0 6 * * *", timezone=unknown)
    fresh(file, "0 6 * * *", timezone="Europe/Berlin")


def test_readers_that_want_different_things_have_different_assets(file: Path) -> None:
    """Of two assets of one name a reader would get the other one's events and cuts."""
    from headwater_airflow.assets import fresh, late, moved

    assert moved(file).name == "shop: all tables (every 60 s)"
    assert moved(file, keep_cut="1d").name == moved(file).name
    assert moved(file, keep_cut="30d").name == "shop: all tables (every 60 s, cuts kept for 2592000 s)"
    assert fresh(file, "0 6 * * *").name == "shop: all tables fresh at 0 6 * * * UTC"
    assert fresh(file, "0 6 * * *", keep_cut=60).name == "shop: all tables fresh at 0 6 * * * UTC, cuts kept for 60 s"
    assert late(file).name == "shop: a table late"
    assert late(file, remind_every="1h").name == "shop: a table late, again every 3600 s"


def test_a_table_s_name_may_hold_what_no_uri_does(tmp_path: Path) -> None:
    file = page_pipeline(tmp_path, "shop", 'public."a[1]"', 'public."a／b"', 'public."é"')
    made = asset_of("moved", file, tables=['public."a[1]"'])
    assert made.name == 'shop: public."a[1]" (every 60 s)'
    assert made.uri == 'x-headwater://shop: public."a%5B1%5D" (every 60 s)'
    assert asset_of("moved", file, tables=['public."a／b"']).uri.isascii()
    assert asset_of("moved", file, tables=['public."é"']).uri == 'x-headwater://shop: public."é" (every 60 s)'


def test_assets_of_many_tables_have_names_that_airflow_takes(file: Path) -> None:
    from headwater_airflow.assets import fresh, late, moved

    many = [f"public.log_of_a_long_name_{number:03}" for number in range(100)]
    named = {
        asset.name
        for tables in (many, many[1:], many[:-1])
        for asset in (moved(file, tables), fresh(file, "0 6 * * *", tables), late(file, tables))
    }
    assert len(named) == 9
    assert all(len(name) < 80 for name in named)
    assert moved(file, many[::-1]).name == moved(file, many).name
    told = [many[0] in moved(file, many[:number]).name for number in range(1, 100)]
    assert told == [True] * told.count(True) + [False] * told.count(False), "the tables themselves, where they fit"
    assert 40 < told.count(True) < 60


def asset_of(kind: str, file: Path, **arguments: Any) -> Asset:
    from headwater_airflow import assets

    make: dict[str, Callable[..., Asset]] = {"moved": assets.moved, "fresh": assets.fresh, "late": assets.late}
    arguments = {"tables": ["public.a"], **arguments}
    return make[kind](str(file), *(["0 6 * * *"] if kind == "fresh" else []), **arguments)


def watcher_of(asset: Asset) -> BaseEventTrigger:
    (watcher,) = asset.watchers
    trigger: BaseEventTrigger = watcher.trigger
    return trigger


def identity(asset: Asset) -> int:
    """By which Airflow tells one trigger from another."""
    from airflow.serialization.encoders import encode_trigger
    from airflow.triggers.base import BaseEventTrigger

    stored = encode_trigger(watcher_of(asset))
    return BaseEventTrigger.hash(stored["classpath"], stored["kwargs"])


@pytest.mark.parametrize("kind", KINDS)
def test_two_names_for_the_same_tables_are_two_watchers(kind: str, file: Path) -> None:
    one, other = (asset_of(kind, file, name=name) for name in ("for one", "for the other"))
    assert identity(one) != identity(other)
    assert identity(one) == identity(asset_of(kind, file, name="for one"))
    assert watcher_of(one).shared_stream_key() == watcher_of(other).shared_stream_key(), "they look together"


def test_one_look_at_a_lake_serves_what_has_moved_and_what_is_fresh(file: Path) -> None:
    one, other, alarm = (watcher_of(asset_of(kind, file)).shared_stream_key() for kind in KINDS)
    assert one == other
    assert alarm != one, "which asks the source as well, and seldom"


@pytest.mark.parametrize("kind", KINDS)
def test_a_watcher_is_made_again_of_what_is_stored_also_by_an_older_version(kind: str, file: Path) -> None:
    path, arguments = watcher_of(asset_of(kind, file)).serialize()
    module, _, name = path.rpartition(".")
    known = json.loads(json.dumps(arguments))
    make = getattr(importlib.import_module(module), name)
    assert make(**known).serialize() == (path, arguments)
    del known["asset"]
    assert make(**known).serialize() == (path, {**arguments, "asset": ""})
