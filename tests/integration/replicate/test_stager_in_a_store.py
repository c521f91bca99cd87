"""The stager process and a lake in S3 whose keys the pipeline file gives, and nobody else."""

from __future__ import annotations

import contextlib
import os
from dataclasses import replace

import pyarrow as pa
import pytest

from fixtures.object_stores import S3Server
from headwater import store_options
from headwater.delta import small_tables
from headwater.replicate.preapply.process import Stage, StagingTarget
from headwater.replicate.preapply.stager import Stager
from headwater.schema import Column, Leaf, TableSchema, ValueType

SCHEMA = TableSchema(
    1, "public", "t", (Column("v", 1, 20, -1, ValueType("int8", "bigint")),), ("v",), (Leaf(1, "public", "t", 1),)
)


def test_the_stager_enters_the_store_as_its_driver_does_and_with_keys_that_were_renewed(
    s3_server: S3Server, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    root = s3_server.uri(s3_server.bucket(), "lake")
    store_options.register(root, s3_server.entry)
    small_tables.create_table(f"{root}/t", pa.schema([("v", pa.int64())]))
    has_read = "it has no deletion vectors"
    message = Stage(1, StagingTarget("public.t", f"{root}/t", SCHEMA), f"{root}/staged", ())
    with contextlib.closing(Stager(root)) as stager:
        assert stager.ask(message).refused == has_read
        exchanged = (("access_key_id", s3_server.access_key), ("secret_access_key", "exchanged"))
        store_options.register(root, replace(s3_server.entry, secrets=exchanged))
        assert f"{root}/t" in stager.ask(message).refused, "the store has refused it"
        store_options.register(root, s3_server.entry)
        assert stager.ask(message).refused == has_read
