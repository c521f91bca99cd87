"""What a process knows of the stores of its lakes."""

from __future__ import annotations

import os

import pytest

from headwater import store_options
from headwater.errors import Refused
from headwater.store_options import StoreOptions, refuse_foreign_secrets

KEYS = {"access_key_id": "a", "secret_access_key": "b"}
SAS = {"sas_token": "sig=a"}
PRINCIPAL = {"tenant_id": "t", "client_id": "c", "client_secret": "s"}


@pytest.fixture
def alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """The environment has none of the variables that libraries take secrets from."""
    for name in [name for name in os.environ if name.startswith(("AWS_", "AZURE_")) or name.endswith("TOKEN")]:
        monkeypatch.delenv(name)


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("secrets", "environment"),
    [
        (KEYS, "AWS_ACCESS_KEY_ID AWS_SECRET_ACCESS_KEY AZURE_STORAGE_ACCOUNT_KEY"),
        (KEYS | {"session_token": "t"}, "AWS_SESSION_TOKEN"),
        ({"account_key": "k"}, "AZURE_STORAGE_SAS_TOKEN AZURE_FEDERATED_TOKEN_FILE AZURE_CLIENT_SECRET"),
        (SAS, "AZURE_STORAGE_SAS_TOKEN"),
        (PRINCIPAL, "AZURE_STORAGE_SAS_TOKEN AZURE_CLIENT_SECRET"),
        ({}, "AWS_SESSION_TOKEN AZURE_STORAGE_ACCOUNT_KEY"),
    ],
)
def test_keys_that_are_given_go_before_their_like_in_the_environment(
    secrets: dict[str, str], environment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in environment.split():
        monkeypatch.setenv(name, "of others")
    refuse_foreign_secrets(secrets, "the pipeline file", "shop.yaml: lake.storage.a")


@pytest.mark.usefixtures("alone")
@pytest.mark.parametrize(
    ("secrets", "foreign"),
    [
        (KEYS, "AWS_SESSION_TOKEN, TOKEN"),  # delta-rs takes the second one, too
        ({"access_key_id": "a"}, "AWS_SECRET_ACCESS_KEY"),
        (SAS, "AZURE_STORAGE_ACCOUNT_KEY"),
        (SAS, "AZURE_FEDERATED_TOKEN_FILE"),
        (SAS, "AZURE_CLIENT_SECRET"),
        (PRINCIPAL, "AZURE_STORAGE_ACCESS_KEY"),
        (PRINCIPAL, "AZURE_STORAGE_TOKEN"),
        ({"account_key": "k"}, "AZURE_STORAGE_TOKEN"),
    ],
)
def test_keys_that_are_given_are_mixed_with_no_others_of_the_environment(
    secrets: dict[str, str], foreign: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in foreign.split(", "):
        monkeypatch.setenv(name, "of others")
    with pytest.raises(Refused, match=f"would take {foreign} of the environment with the keys") as no:
        refuse_foreign_secrets(secrets, "the pipeline file", "shop.yaml: lake.storage.a")
    assert no.value.remedy == f"unset {foreign} where this runs, or take lake.storage.a out of the file"


def test_of_lakes_that_lie_in_each_other_the_innermost_says_how_a_place_is_entered(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(store_options, "_known", {})
    for root in ("s3://lake/team", "s3://lake", "s3://lake/team/shop", "s3://lake/te"):
        store_options.register(root, StoreOptions(region=root))
    for place, root in [
        ("s3://lake/team/shop/public/t", "s3://lake/team/shop"),
        ("s3://lake/team/shops", "s3://lake/team"),
        ("s3://lake/team", "s3://lake/team"),
        ("s3://lake/other", "s3://lake"),
        ("s3://lakes/team", ""),
    ]:
        assert store_options.of(place).region == root, place
