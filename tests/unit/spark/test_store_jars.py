"""Jars for S3 and Azure: what is pinned, which sessions have them, and what is said where they are missing."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pyspark
import pytest

from headwater import store_options
from headwater.errors import Refused
from headwater.session import submit_conf
from headwater.spark import jars, stores
from headwater.spark.session import job_conf
from headwater.store_options import StoreOptions

LAKE = "s3://lake/shop"
ACCOUNT = "account.dfs.core.windows.net"
AZURE = f"abfss://lake@{ACCOUNT}/shop"
REDACTED = re.compile("(?i)secret|password|token|access[.]?key")
"""Spark's default of `spark.redaction.regex`."""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the jars lie that a session needs in any case."""
    monkeypatch.setenv("HEADWATER_JARS", str(tmp_path))
    for name in (*(jar.file_name for jar in jars.JARS), jars.log_store_jar()):
        (tmp_path / name).touch()
    return tmp_path


def put_jars(folder: Path, store: str) -> list[str]:
    paths = [folder / jar.file_name for jar in jars.store_jars(store)]
    for path in paths:
        path.touch()
    return [str(path) for path in paths]


def test_every_jar_is_pinned_once_and_whole() -> None:
    pinned = [*jars.JARS, *(jar for store in jars.STORES for jar in jars.store_jars(store))]
    assert {jar.artifact for jar in pinned} >= {"hadoop-aws", "s3", "s3-transfer-manager", "sts", "hadoop-azure"}
    for jar in pinned:
        assert re.fullmatch(r"[a-z][a-z0-9.]+", jar.group)
        assert re.fullmatch(r"[a-z][A-Za-z0-9._-]+", jar.artifact)
        assert re.fullmatch(r"[0-9]+(\.[0-9]+)+", jar.version)
        assert re.fullmatch(r"[0-9a-f]{64}", jar.sha256)
    for all_of in ([(jar.group, jar.artifact) for jar in pinned], [jar.file_name for jar in pinned]):
        assert len(set(all_of)) == len(all_of)
    assert len({jar.sha256 for jar in pinned}) == len(pinned)
    assert len({jar.version for jar in pinned if jar.group == "software.amazon.awssdk"}) == 1


@pytest.mark.parametrize(("store", "artifact"), [("s3", "hadoop-aws"), ("azure", "hadoop-azure")])
def test_a_connector_is_of_the_hadoop_that_pyspark_brings(store: str, artifact: str) -> None:
    (connector,) = (jar for jar in jars.store_jars(store) if jar.artifact == artifact)
    brought = {path.name for path in (Path(pyspark.__file__).parent / "jars").glob("hadoop-client-api-*.jar")}
    assert brought == {f"hadoop-client-api-{connector.version}.jar"}


def test_spark_brings_no_second_copy_of_a_jar() -> None:
    brought = {path.name.rpartition("-")[0] for path in (Path(pyspark.__file__).parent / "jars").glob("*.jar")}
    assert not brought & {jar.artifact for store in jars.STORES for jar in jars.store_jars(store)}


def test_only_a_session_for_a_lake_in_a_store_has_its_jars_and_settings(folder: Path) -> None:
    plain = submit_conf()
    assert submit_conf("/lake") == submit_conf("file:///lake") == submit_conf("gs://lake/shop") == plain
    assert submit_conf(LAKE)["spark.jars"] == plain["spark.jars"]  # not fetched: most jobs do without
    paths, azure = put_jars(folder, "s3"), put_jars(folder, "azure")
    assert submit_conf("/lake") == plain
    assert submit_conf(AZURE) == {
        **plain,
        "spark.jars": ",".join([plain["spark.jars"], *azure]),
        "spark.redaction.regex": f"{REDACTED.pattern}|account[.]key",
    }
    assert submit_conf(LAKE) == {
        **plain,
        "spark.jars": ",".join([plain["spark.jars"], *paths]),
        "spark.delta.logStore.s3a.impl": jars.STORE_LOG_STORE,
        "spark.delta.logStore.s3.impl": jars.STORE_LOG_STORE,
    }
    assert submit_conf(LAKE).items() <= job_conf(LAKE).items()


def test_a_job_on_a_cut_that_fell_back_to_the_source_gets_what_any_job_gets() -> None:
    operators = pytest.importorskip("headwater_airflow.operators.spark")
    cut = {"pipeline": "shop", "tables": {"public.orders": {"path": None, "version": None}}, "fallback": {}}
    job = operators.SparkOnCutOperator(task_id="report", application="report.py", cut=cut)
    assert job.spark_conf() == submit_conf()


def test_where_spark_cannot_read_is_said_before_it_starts(folder: Path) -> None:
    for place in ("", "/lake", "file:///lake", "unknown"):
        stores.require_jars(place)
    with pytest.raises(Refused) as missing:
        stores.require_jars(LAKE)
    assert (missing.value.code, missing.value.where) == ("no_jars", LAKE)
    assert "python -m headwater.jars --s3" in missing.value.remedy
    with pytest.raises(Refused, match=r"python -m headwater\.jars --azure"):
        stores.require_jars(AZURE)
    with pytest.raises(Refused) as elsewhere:
        stores.require_jars("gs://lake/shop")
    assert (elsewhere.value.code, elsewhere.value.where) == ("no_connector", "gs://lake/shop")
    put_jars(folder, "s3")
    put_jars(folder, "azure")
    stores.require_jars(LAKE)
    stores.require_jars(AZURE)


def test_the_connector_is_told_what_the_store_is_and_nothing_secret_by_another_name(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("AWS_ENDPOINT_URL", "AWS_ENDPOINT_URL_S3", "AWS_REGION", "AWS_DEFAULT_REGION"):
        monkeypatch.delenv(name, raising=False)

    def told(options: StoreOptions) -> dict[str, str]:
        found = options.hadoop(f"{LAKE}/public/orders")
        assert found.pop("fs.s3.impl") == "org.apache.hadoop.fs.s3a.S3AFileSystem"
        return {name.removeprefix("fs.s3a.bucket.lake."): value for name, value in found.items()}

    of_the_cloud = told(StoreOptions())
    assert of_the_cloud["path.style.access"] == "false"
    assert "endpoint" not in of_the_cloud
    assert "endpoint.region" not in of_the_cloud
    secrets = {"access_key_id": "hidden1", "secret_access_key": "hidden2", "session_token": "hidden3"}
    given = told(StoreOptions("http://127.0.0.1:9000", "", None, tuple(secrets.items())))
    assert (given["endpoint"], given["endpoint.region"]) == ("http://127.0.0.1:9000", "us-east-1")
    assert given["path.style.access"] == "true"
    hidden = {name for name, value in given.items() if value.startswith("hidden")}
    assert hidden == {"access.key", "secret.key", "session.token"}
    assert all(REDACTED.search(name) for name in hidden)
    monkeypatch.setenv("AWS_REGION", "eu-central-1")
    assert told(StoreOptions())["endpoint.region"] == "eu-central-1"
    assert told(StoreOptions(region="eu-west-1", path_style=True)) == {
        **of_the_cloud,
        "endpoint.region": "eu-west-1",
        "path.style.access": "true",
    }


@pytest.mark.parametrize(
    ("secrets", "environment", "expected"),
    [
        ({"account_key": "hidden"}, {}, {"account.auth.type": "SharedKey", "account.key": "hidden"}),
        ({}, {"AZURE_STORAGE_ACCOUNT_KEY": "hidden"}, {"account.auth.type": "SharedKey", "account.key": "hidden"}),
        ({"sas_token": "?hidden"}, {}, {"account.auth.type": "SAS", "sas.fixed.token": "hidden"}),
        (
            {"tenant_id": "t", "client_id": "c", "client_secret": "hidden"},
            {"AZURE_STORAGE_ACCOUNT_KEY": "of somebody else"},
            {
                "account.auth.type": "OAuth",
                "account.oauth.provider.type": "org.apache.hadoop.fs.azurebfs.oauth2.ClientCredsTokenProvider",
                "account.oauth2.client.endpoint": "https://login.microsoftonline.com/t/oauth2/token",
                "account.oauth2.client.id": "c",
                "account.oauth2.client.secret": "hidden",
            },
        ),
        (
            {},
            {"AZURE_TENANT_ID": "t", "AZURE_CLIENT_ID": "c", "AZURE_FEDERATED_TOKEN_FILE": "/token"},
            {
                "account.auth.type": "OAuth",
                "account.oauth.provider.type": "org.apache.hadoop.fs.azurebfs.oauth2.WorkloadIdentityTokenProvider",
                "account.oauth2.client.id": "c",
                "account.oauth2.msi.tenant": "t",
                "account.oauth2.token.file": "/token",
            },
        ),
        (
            {},
            {},
            {
                "account.auth.type": "OAuth",
                "account.oauth.provider.type": "org.apache.hadoop.fs.azurebfs.oauth2.MsiTokenProvider",
            },
        ),
    ],
)
def test_the_connector_for_azure_is_told_how_this_account_is_entered_and_spark_shows_none_of_it(
    secrets: dict[str, str], environment: dict[str, str], expected: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in [name for name in os.environ if name.startswith("AZURE_")]:
        monkeypatch.delenv(name)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    told = StoreOptions(secrets=tuple(secrets.items())).hadoop(f"{AZURE}/public/orders")
    assert told == {f"fs.azure.{name}.{ACCOUNT}": value for name, value in expected.items()}
    shown = re.compile(stores.redaction_for(AZURE)["spark.redaction.regex"])
    assert all(shown.search(name) for name, value in told.items() if value == "hidden")


@pytest.mark.parametrize(("lake", "secret"), [(LAKE, "secret_access_key"), (AZURE, "account_key")])
def test_no_secret_is_among_the_settings_of_a_submission(
    folder: Path, monkeypatch: pytest.MonkeyPatch, lake: str, secret: str
) -> None:
    for store in jars.STORES:
        put_jars(folder, store)
    monkeypatch.setattr(store_options, "_known", {})
    store_options.register(lake, StoreOptions(secrets=((secret, "hidden"),)))
    assert "hidden" not in str(job_conf(lake))
