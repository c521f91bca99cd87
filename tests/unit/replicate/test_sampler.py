"""What a running driver makes of a source that gives it no session."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headwater.errors import HeadwaterError, Refused, SourceChanged, SourceUnreachable
from headwater.replicate import sampler
from headwater.replicate.sampler import Sampler

REFUSED = 'connection to server at "10.0.0.1", port 5432 failed: Connection refused'
FULL = 'connection to server at "10.0.0.2", port 5432 failed: FATAL: sorry, too many clients already'


@pytest.mark.parametrize(
    ("failure", "stops"),
    [
        (SourceUnreachable(FULL), False),
        (SourceUnreachable(f"{REFUSED} {FULL}"), False),
        (Refused("no pg_hba.conf entry for host", code="not_authorised"), False),
        (SourceUnreachable("could not translate host name"), False),
        (SourceUnreachable(REFUSED), True),
        (SourceChanged("another server answers"), True),  # no shutdown, but the end of the log's connection
        (SourceUnreachable(f"{REFUSED} failed: FATAL: the database system is shutting down"), True),
    ],
)
def test_a_server_goes_only_if_it_says_so_or_nobody_listens(
    failure: HeadwaterError, stops: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def connect(*_: object, **__: object) -> None:
        raise failure

    monkeypatch.setattr(sampler, "connect", connect)
    monkeypatch.setattr(sampler, "_PERIOD", 0.0)
    told: list[bool] = []
    nothing: Any = SimpleNamespace(conninfo=str, look_away=lambda: None, tick=None, write=lambda: None)
    watching = Sampler(nothing, nothing, nothing, nothing, nothing, nothing, nothing, nothing, 0.0)

    def no_session(*, stops: bool) -> None:
        told.append(stops)
        watching._stop.set()

    nothing.no_session = no_session
    watching._run()
    assert told == [stops]
