"""Profiles of Amazon's configuration files: `lake.storage.profile`."""

from __future__ import annotations

import json
import sys
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pytest

from headwater import store_options
from headwater.errors import Refused, Transient
from headwater.pipeline_file.pipeline import BadPipelineFile, Pipeline, load_pipeline

SECRET = "hw-secret-91"
CONFIG = """
[profile plain]
aws_access_key_id = AKIA
aws_secret_access_key = hw-secret-91
region = eu-north-1
endpoint_url = http://minio:9000
[profile expiring]
credential_process = cat {folder}/answer
[profile failing]
credential_process = cat {folder}/nothing
[profile absent]
credential_process = {folder}/no_such_program
[profile garbled]
credential_process = cat {folder}/config
[profile circle]
source_profile = circle
role_arn = arn:aws:iam::1:role/x
[profile empty]
region = eu-north-1
"""


@pytest.fixture(autouse=True)
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "config").write_text(CONFIG.format(folder=tmp_path))
    (tmp_path / "credentials").touch()
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "config"))
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", str(tmp_path / "credentials"))
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(store_options, "_known", {})
    monkeypatch.setattr(store_options, "_renewals", {})


def _pipeline(folder: Path, storage: str, lake: str = "root: 's3://bucket/shop'") -> Pipeline:
    file = folder / "shop.yaml"
    source = "source: {connection: 'postgresql://x@localhost/x'}"
    file.write_text(f"pipeline: shop\n{source}\nlake: {{{lake}, storage: {{{storage}}}}}\ntables: [public.a]\n")
    return load_pipeline(str(file))


def _answer(folder: Path, key: str, seconds: float) -> None:
    until = datetime.now(UTC).replace(microsecond=0) + timedelta(seconds=seconds)
    keys = {"Version": 1, "AccessKeyId": key, "SecretAccessKey": SECRET, "SessionToken": "t"}
    (folder / "answer").write_text(json.dumps({**keys, "Expiration": until.isoformat()}))


def test_keys_region_and_endpoint_are_the_profile_s_and_the_file_goes_before_them(tmp_path: Path) -> None:
    found = store_options.of(_pipeline(tmp_path, "profile: plain").lake_path())
    assert dict(found.secrets) == {"access_key_id": "AKIA", "secret_access_key": SECRET}
    assert (found.region, found.endpoint) == ("eu-north-1", "http://minio:9000")
    assert SECRET not in repr(found)
    told = "profile: plain, region: eu-west-1, endpoint: 'http://other:1'"
    found = store_options.of(_pipeline(tmp_path, told).lake_path())
    assert (found.region, found.endpoint) == ("eu-west-1", "http://other:1")


def test_keys_that_expire_are_asked_for_again_before_they_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    began = time.monotonic()
    _answer(tmp_path, "FIRST", 3600)
    root = _pipeline(tmp_path, "profile: expiring").lake_path()
    assert dict(store_options.of(root).secrets)["access_key_id"] == "FIRST"
    _answer(tmp_path, "SECOND", 3600)
    assert dict(store_options.of(root).secrets)["access_key_id"] == "FIRST", "they are good for long"
    monkeypatch.setattr(time, "monotonic", lambda: began + 3600 - 590)
    assert dict(store_options.of(root).secrets)["access_key_id"] == "SECOND"
    (tmp_path / "answer").unlink()
    monkeypatch.setattr(time, "monotonic", lambda: began + 7200)
    assert dict(store_options.of(root).secrets)["access_key_id"] == "SECOND", "those of before go on"
    assert "could not be fetched again" in caplog.text
    assert SECRET not in caplog.text


@pytest.mark.parametrize(
    ("profile", "kind", "said"),
    [
        ("nobody", Refused, "there is no profile nobody"),
        ("failing", Transient, "the profile failing gave no keys"),
        ("absent", Transient, "the profile absent gave no keys"),
        ("garbled", Transient, "the profile garbled gave no keys"),
        ("circle", Refused, "the profile circle does not hold together"),
        ("empty", Refused, "the profile empty names no keys"),
    ],
)
def test_a_profile_that_opens_nothing_is_said_by_name(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, profile: str, kind: type[Exception], said: str
) -> None:
    with pytest.raises(kind, match=said) as raised:
        _pipeline(tmp_path, f"profile: {profile}").lake_path()
    assert SECRET not in f"{raised.value}{caplog.text}"


def test_the_machine_s_identity_takes_no_profile_s_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(method="iam-role", get_frozen_credentials=lambda: SimpleNamespace(access_key="node"))
    monkeypatch.setattr("botocore.session.Session.get_credentials", lambda self: found)
    with pytest.raises(Refused, match="names no keys"):
        _pipeline(tmp_path, "profile: empty").lake_path()


def test_a_token_of_the_environment_goes_with_no_other_keys(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SESSION_TOKEN", "of other keys")
    with pytest.raises(
        Refused, match="would take AWS_SESSION_TOKEN of the environment with the keys of the profile plain"
    ):
        _pipeline(tmp_path, "profile: plain").lake_path()


def test_what_reads_profiles_may_be_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "botocore.session", None)
    with pytest.raises(Refused, match="botocore, which is not installed") as refused:
        _pipeline(tmp_path, "profile: plain").lake_path()
    assert refused.value.code == "no_provider"


@pytest.mark.parametrize(
    ("storage", "lake", "said"),
    [
        ("profile: plain", "root: 'gs://bucket/shop'", "names keys for S3, and root is elsewhere"),
        ("profile: plain", "root: 's3://bucket/shop', airflow: lake", "storage.profile and airflow both say"),
        ("profile: plain, access_key_id: a", "root: 's3://bucket/shop'", "and storage.access_key_id both say"),
        ("profile: plain, secret_access_key: a", "root: 's3://bucket/shop'", "and storage.secret_access_key both say"),
        ("profile: plain, session_token: a", "root: 's3://bucket/shop'", "and storage.session_token both say"),
    ],
)
def test_two_ways_to_one_store_are_a_fault_of_the_file(tmp_path: Path, storage: str, lake: str, said: str) -> None:
    with pytest.raises(BadPipelineFile, match=said):
        _pipeline(tmp_path, storage, lake)
