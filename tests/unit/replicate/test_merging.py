"""A reload that was made ready beside its lane: what its commit does not name goes behind a sync."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from headwater.delta import storage
from headwater.lake.registry import TableRecord
from headwater.lake.reload_records import Reload
from headwater.replicate.beside.merging import Merging

RELOAD = Reload("r", "public.t", 1, (), "public.t", "s", "read", "2026-01-01T00:00:00Z")


def test_files_go_when_the_commit_that_does_without_them_is_on_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """Behind a power cut that takes the commit, the reload is made ready again of all files that were read."""
    done: list[str] = []

    def commit(*_: Any) -> tuple[None, Any]:
        done.append("committed")
        return None, SimpleNamespace(gone=3)

    monkeypatch.setattr(storage, "sync", lambda _: done.append("synced"))
    ready = SimpleNamespace(discard_left_over=lambda: done.append("removed"))
    preparations: Any = SimpleNamespace(take=lambda _: SimpleNamespace(made_ready=ready))
    tables: Any = SimpleNamespace(commits=SimpleNamespace(commit=commit), has_room_for=lambda *_: True)
    unused: Any = None
    merging = Merging(tables, "/lake", RELOAD, 0, unused, lambda: None, preparations)
    assert merging._put(TableRecord("public.t", "public/t", "active")) == 3
    assert done == ["committed", "synced", "removed"]
