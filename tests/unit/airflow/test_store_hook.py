"""What a lake's Airflow connection becomes: keys for the engine, or one clear refusal; no secret is shown."""

from __future__ import annotations

import asyncio
import json
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk import Connection

from headwater import store_connections, store_options
from headwater.errors import Refused, Transient
from headwater.pipeline_file.pipeline import load_pipeline
from headwater_airflow.hooks.store import (
    fetch_in_server,
    fetch_in_task,
    fetch_in_triggerer,
    store_environment,
    store_text,
)

pytestmark = pytest.mark.airflow

SECRET = "not-for-any-eyes"
AWS = {"conn_type": "aws", "login": "AKIA", "password": SECRET, "extra": {"region_name": "eu-west-1"}}


@pytest.fixture(autouse=True)
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """What one test fetches is not there for the next."""
    monkeypatch.setattr(store_connections, "_fetch", None)
    monkeypatch.setattr(store_options, "_known", {})
    monkeypatch.setattr(store_options, "_renewals", {})


def _told(kind: str, **fields: Any) -> dict[str, Any]:
    extra = fields.pop("extra", None)
    connection = Connection(conn_id="lake", conn_type=kind, extra=json.dumps(extra) if extra else None, **fields)
    found: dict[str, Any] = json.loads(store_text(connection))
    return found


def _pipeline(folder: Path) -> Path:
    file = folder / "shop.yaml"
    file.write_text(
        "pipeline: shop\nsource: {connection: 'postgresql://x@localhost/x'}\n"
        "lake: {root: 's3://bucket/shop', airflow: lake, storage: {region: eu-north-1}}\ntables: [public.a]\n"
    )
    return file


def test_keys_endpoint_and_region_of_an_amazon_connection() -> None:
    told = _told("aws", login="AKIA", password=SECRET, extra={"region_name": "eu", "endpoint_url": "http://minio:9000"})
    keys = {"access_key_id": "AKIA", "secret_access_key": SECRET}
    assert told == {"endpoint": "http://minio:9000", "region": "eu", "secrets": keys, "good_until": None}
    of_s3 = {"service_config": {"s3": {"endpoint_url": "http://s3:1"}}, "endpoint_url": "http://all:2"}
    assert _told("aws", login="AKIA", password=SECRET, extra=of_s3)["endpoint"] == "http://s3:1"


def test_keys_that_expire_come_with_their_token_and_say_when(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    until = datetime.now(UTC).replace(microsecond=0) + timedelta(hours=1)
    answer = {"Version": 1, "AccessKeyId": "ASIA", "SecretAccessKey": SECRET, "SessionToken": "t"}
    (tmp_path / "answer").write_text(json.dumps({**answer, "Expiration": until.isoformat()}))
    (tmp_path / "config").write_text(f"[profile analytics]\ncredential_process = cat {tmp_path}/answer\n")
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    told = _told("aws", extra={"profile_name": "analytics"})
    keys = {"access_key_id": "ASIA", "secret_access_key": SECRET, "session_token": "t"}
    assert (told["secrets"], told["good_until"]) == (keys, until.timestamp())


@pytest.mark.parametrize(
    ("kind", "fields", "secrets"),
    [
        ("wasb", {"login": "account", "password": SECRET}, {"account_key": SECRET}),
        ("wasb", {"extra": {"sas_token": "?sig=x"}}, {"sas_token": "sig=x"}),
        (
            "adls",
            {"login": "app", "password": SECRET, "extra": {"tenant_id": "t"}},
            {"tenant_id": "t", "client_id": "app", "client_secret": SECRET},
        ),
        ("google_cloud_platform", {"extra": {"keyfile_dict": {"k": 1}}}, {"service_account_key": '{"k": 1}'}),
        ("google_cloud_platform", {"extra": {"keyfile_dict": '{"k": 1}'}}, {"service_account_key": '{"k": 1}'}),
        ("google_cloud_platform", {"extra": {"key_path": "/k.json"}}, {"service_account": "/k.json"}),
    ],
)
def test_keys_of_the_other_clouds(kind: str, fields: dict[str, Any], secrets: dict[str, str]) -> None:
    assert _told(kind, **fields) == {"secrets": secrets}


@pytest.mark.parametrize(
    ("kind", "fields", "said"),
    [
        ("postgres", {"password": SECRET}, "is of the type postgres, which is no object store's"),
        ("wasb", {"login": "account"}, "has no account_key"),
        ("adls", {"password": SECRET, "extra": {"tenant_id": "t"}}, "has no client_id"),
        ("google_cloud_platform", {}, "has no service_account"),
    ],
)
def test_a_connection_that_opens_no_store_is_refused(kind: str, fields: dict[str, Any], said: str) -> None:
    with pytest.raises(Refused, match=said) as refused:
        _told(kind, **fields)
    assert SECRET not in str(refused.value)


def test_a_driver_has_the_keys_from_its_operator_and_the_file_goes_before_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_LAKE", json.dumps(AWS))
    environment = store_environment("lake")
    pipeline = load_pipeline(_pipeline(tmp_path), environment)
    options = store_options.of(f"{pipeline.lake_path()}/public/a")
    assert options.region == "eu-north-1"
    assert dict(options.secrets) == {"access_key_id": "AKIA", "secret_access_key": SECRET}
    assert SECRET not in f"{pipeline!r} {options!r}"
    with pytest.raises(Refused, match="HEADWATER_STORE_LAKE is not set"):
        load_pipeline(_pipeline(tmp_path), {}).lake_path()
    for wrong in (SECRET, '["x"]', '{"secrets": 7}', '{"secrets": {}, "good_until": "never"}'):
        with pytest.raises(Refused, match="not what Headwater's operators hand over") as refused:
            load_pipeline(_pipeline(tmp_path), {"HEADWATER_STORE_LAKE": wrong}).lake_path()
        assert SECRET not in str(refused.value)


def test_a_token_of_the_environment_goes_with_no_connections_keys(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_LAKE", json.dumps(AWS))
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of other keys")
    pipeline = load_pipeline(_pipeline(tmp_path), store_environment("lake"))
    with pytest.raises(
        Refused, match="take AWS_SESSION_TOKEN of the environment with the keys of the Airflow connection lake"
    ) as refused:
        pipeline.lake_path()
    assert "take lake.airflow out of the file" in str(refused.value)


def test_keys_of_the_file_replace_a_connections_as_a_whole(tmp_path: Path) -> None:
    file = tmp_path / "shop.yaml"
    file.write_text(
        "pipeline: shop\nsource: {connection: 'postgresql://x@localhost/x'}\n"
        "lake: {root: 'abfss://lake@account.dfs.core.windows.net', airflow: lake, storage: {sas_token: sig=a}}\n"
        "tables: [public.a]\n"
    )
    told = {"HEADWATER_STORE_LAKE": json.dumps({"secrets": {"account_key": SECRET}})}
    options = store_options.of(load_pipeline(file, told).lake_path())
    assert dict(options.secrets) == {"sas_token": "sig=a"}


@pytest.mark.parametrize("where", ["task", "triggerer", "server"])
def test_processes_of_airflow_fetch_the_keys_themselves_and_again_when_they_are_due(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setenv("AIRFLOW_CONN_LAKE", json.dumps(AWS))
    file = _pipeline(tmp_path)

    def key() -> str:
        return dict(store_options.of(load_pipeline(file).lake_path()).secrets)["secret_access_key"]

    async def found() -> list[str]:
        if where == "triggerer":
            fetch_in_triggerer()
        else:
            (fetch_in_task if where == "task" else fetch_in_server)()
        keys = [await asyncio.to_thread(key)]
        monkeypatch.setenv("AIRFLOW_CONN_LAKE", json.dumps({**AWS, "password": "another"}))
        keys.append(await asyncio.to_thread(key))
        store_options._renewals["s3://bucket/shop"].due = 0
        keys.append(await asyncio.to_thread(key))
        monkeypatch.delenv("AIRFLOW_CONN_LAKE")
        store_options._renewals["s3://bucket/shop"].due = 0
        return [*keys, await asyncio.to_thread(key)]

    # Fetched once, good for minutes; then anew; and what was known goes on where nothing can be had.
    assert asyncio.run(found()) == [SECRET, SECRET, "another", "another"]


def test_a_connection_that_is_not_there_or_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fetch_in_task()
    file = _pipeline(tmp_path)
    monkeypatch.delenv("AIRFLOW_CONN_LAKE", raising=False)
    with pytest.raises(Refused, match="there is no Airflow connection lake") as refused:
        load_pipeline(file).lake_path()
    assert (refused.value.code, refused.value.where) == ("no_connection", "lake.airflow")
    nobody = {"service_config": {"sts": {"endpoint_url": "http://127.0.0.1:9"}}}
    hurry = {"config_kwargs": {"connect_timeout": 1, "retries": {"max_attempts": 0}}}
    role = {"role_arn": "arn:aws:iam::1:role/x", **nobody, **hurry}
    monkeypatch.setenv("AIRFLOW_CONN_LAKE", json.dumps({**AWS, "extra": role}))
    with pytest.raises(Transient, match="the Airflow connection lake gave no keys") as failed:
        load_pipeline(file).lake_path()
    assert SECRET not in str(failed.value)
