"""The Airflow connection of a lake's object store, as Headwater's engine takes it (`lake.airflow`).

A connection of Amazon's type is read by Amazon's provider, which knows roles, profiles and web identities; what Azure's
and Google's types keep, an account's key or token and a service account's, is read here. The text goes to a driver in
one environment variable; processes of Airflow's own fetch it when they need it, and again before it expires.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from headwater import store_connections
from headwater.errors import HeadwaterError, Refused, Transient

if TYPE_CHECKING:
    from airflow.sdk import Connection

_FETCH_SECONDS = 30.0


def store_environment(conn_id: str) -> dict[str, str]:
    """For a task: the variable that the engine reads. Secret."""
    return {store_connections.store_variable(conn_id): _in_task(conn_id)}


def fetch_in_task() -> None:
    """From now on this process, a task's, finds the connections of lakes in Airflow."""
    store_connections.fetch_by(_in_task)


def fetch_in_triggerer() -> None:
    """The same in a triggerer, from whose event loop this is called: a thread asks by way of that."""
    event_loop = asyncio.get_running_loop()

    def fetch(conn_id: str) -> str:
        from airflow.sdk import BaseHook

        asking = asyncio.run_coroutine_threadsafe(BaseHook.aget_connection(conn_id), event_loop)
        return _told(conn_id, lambda: asking.result(_FETCH_SECONDS))

    store_connections.fetch_by(fetch)


def fetch_in_server() -> None:
    """The same in the API server."""

    def fetch(conn_id: str) -> str:
        from airflow.models.connection import Connection

        return _told(conn_id, lambda: Connection.get_connection_from_secrets(conn_id))

    store_connections.fetch_by(fetch)


def _in_task(conn_id: str) -> str:
    from airflow.sdk import BaseHook

    return _told(conn_id, lambda: BaseHook.get_connection(conn_id))


def _told(conn_id: str, connection: Callable[[], Any]) -> str:
    """The text of the connection. No error holds anything of it."""
    from airflow.sdk.exceptions import AirflowNotFoundException

    try:
        return store_text(connection())
    except HeadwaterError:
        raise
    except AirflowNotFoundException:
        raise Refused(
            f"there is no Airflow connection {conn_id}",
            code="no_connection",
            where="lake.airflow",
            remedy="create the connection",
        ) from None
    except Exception as error:  # Airflow's API server, or what the connection asks for its keys
        raise Transient(
            f"the Airflow connection {conn_id} gave no keys ({type(error).__name__})",
            code="lake_unavailable",
            where="lake.airflow",
            remedy="test the connection in Airflow, from the machine that this runs on",
        ) from None


def store_text(connection: Connection) -> str:
    """What `connection` says of a store, in the words of `headwater.store_connections`. Secret. Refused for a type that
    is no cloud's, and for keys that Headwater cannot use."""
    kind = str(connection.conn_type)
    if kind not in _READERS:
        raise Refused(
            f"the Airflow connection {connection.conn_id} is of the type {kind}, which is no object store's",
            code="no_connection",
            where="lake.airflow",
            remedy=f"name one of the types {', '.join(sorted(_READERS))}",
        )
    return json.dumps(_READERS[kind](connection))


def _amazon(connection: Connection) -> dict[str, Any]:
    try:
        from airflow.providers.amazon.aws.hooks.base_aws import BaseSessionFactory
        from airflow.providers.amazon.aws.utils.connection_wrapper import AwsConnectionWrapper
    except ModuleNotFoundError:
        raise Refused(
            "connections of Amazon's type are read by Airflow's provider for it, which is not installed here",
            code="no_provider",
            where="lake.airflow",
            remedy="install apache-airflow-providers-amazon (the extra headwater[amazon]) wherever Airflow runs",
        ) from None
    told = AwsConnectionWrapper(conn=connection)
    found = BaseSessionFactory(conn=told).create_session().get_credentials()
    secrets, good_until = {}, None
    if found is not None:  # else the environment's chain holds, as in any program
        keys = found.get_frozen_credentials()
        secrets = {
            "access_key_id": keys.access_key,
            "secret_access_key": keys.secret_key,
            **({"session_token": keys.token} if keys.token else {}),
        }
        expiry = getattr(found, "_expiry_time", None)  # botocore has no other word for it
        good_until = expiry.timestamp() if expiry is not None else None
    return {
        "endpoint": told.get_service_endpoint_url("s3") or "",
        "region": told.region_name or "",
        "secrets": secrets,
        "good_until": good_until,
    }


def _azure(connection: Connection) -> dict[str, Any]:
    extra = dict(connection.extra_dejson or {})
    if token := extra.get("sas_token"):
        return {"secrets": {"sas_token": str(token).removeprefix("?")}}
    if tenant := extra.get("tenant_id"):
        identity = {"tenant_id": tenant, "client_id": connection.login, "client_secret": connection.password}
        return {"secrets": _complete(connection, identity)}
    return {"secrets": _complete(connection, {"account_key": connection.password})}


def _google(connection: Connection) -> dict[str, Any]:
    extra = dict(connection.extra_dejson or {})
    if key := extra.get("keyfile_dict"):
        return {"secrets": {"service_account_key": key if isinstance(key, str) else json.dumps(key)}}
    return {"secrets": _complete(connection, {"service_account": extra.get("key_path")})}


def _complete(connection: Connection, secrets: dict[str, Any]) -> dict[str, str]:
    if missing := [name for name, value in secrets.items() if not value]:
        raise Refused(
            f"the Airflow connection {connection.conn_id} has no {missing[0]}, and nothing else that opens a store",
            code="no_connection",
            where="lake.airflow",
            remedy="give it the account's key, a SAS token or a service principal (Azure), a keyfile (Google); for an "
            "identity of the machine leave lake.airflow out of the pipeline file",
        )
    return {name: str(value) for name, value in secrets.items()}


_READERS: dict[str, Callable[[Connection], dict[str, Any]]] = {
    "aws": _amazon,
    "wasb": _azure,
    "adls": _azure,
    "google_cloud_platform": _google,
}
