"""Credentials that expire while a process works with its lake: they are renewed, and nobody notices."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pytest

from fixtures.object_stores import S3Server
from fixtures.store_faults import MoodyStore
from headwater import store_options, store_profiles
from headwater.delta import small_tables, storage
from headwater.store_options import StoreOptions

ROWS = pa.schema([("a", pa.int64())])


@pytest.fixture
def store(s3_server: S3Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[MoodyStore]:
    """It lets in who has a token that is still good. This process is like a pod: it is told where to ask for one."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    (tmp_path / "token").write_text("of the pod")
    with MoodyStore(s3_server.address, (s3_server.access_key, s3_server.secret_key)) as store:
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", f"http://{store.address}/credentials")
        monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE", str(tmp_path / "token"))
        yield store


def test_temporary_credentials_are_renewed_for_every_library_that_uses_them(
    s3_server: S3Server, store: MoodyStore
) -> None:
    root = s3_server.uri(s3_server.bucket(), "lake")
    options = StoreOptions(s3_server.through(store.address).endpoint, s3_server.region)
    store_options.register(root, options)
    table = small_tables.create_table(f"{root}/small", ROWS)
    for number in range(2):
        time.sleep(store.TOKEN_SECONDS)  # what this process has is worth nothing from now on
        small_tables.append_once(table, [{"a": number}], ROWS)
        assert small_tables.write_checkpoint(f"{root}/small") == number + 1  # by delta-rs
        assert storage.exists(f"{root}/small/_delta_log/_last_checkpoint")
    assert sorted(row["a"] for row in small_tables.rows_of(table)) == [0, 1]
    given, refused = store.tokens
    assert (given > 2, refused) == (True, 0)


def test_keys_that_a_profile_s_program_gives_are_renewed_too(
    s3_server: S3Server, store: MoodyStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ask.py").write_text(
        "import json, os, urllib.request\n"
        "ask = urllib.request.Request(os.environ['AWS_CONTAINER_CREDENTIALS_FULL_URI'])\n"
        "ask.add_header('Authorization', open(os.environ['AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE']).read())\n"
        "found = json.load(urllib.request.urlopen(ask))\n"
        "print(json.dumps({'Version': 1, 'SessionToken': found.pop('Token'), **found}))\n"
    )
    (tmp_path / "config").write_text(
        f"[profile pod]\ncredential_process = {sys.executable} {tmp_path}/ask.py\nregion = {s3_server.region}\n"
        f"endpoint_url = {s3_server.through(store.address).endpoint}\n"
    )
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setattr(store_options, "_BEFORE_SECONDS", 3)
    monkeypatch.setattr(store_options, "_SOONEST_SECONDS", 0)
    root = s3_server.uri(s3_server.bucket(), "lake")
    store_profiles.enter(root, "pod", StoreOptions(), "the file")
    table = small_tables.create_table(f"{root}/small", ROWS)
    for number in range(2):
        time.sleep(store.TOKEN_SECONDS)
        small_tables.append_once(table, [{"a": number}], ROWS)
        assert small_tables.write_checkpoint(f"{root}/small") == number + 1
    assert sorted(row["a"] for row in small_tables.rows_of(table)) == [0, 1]
    given, refused = store.tokens
    assert (given > 2, refused) == (True, 0)
