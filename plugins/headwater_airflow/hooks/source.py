"""The source's Airflow connection, handed to the engine as one environment variable.

A pipeline file may say `connection: "airflow: <conn_id>"`. The engine knows no Airflow, so whoever starts it
resolves the connection where it runs (worker or triggerer) and hands over a libpq URI; nothing of it goes into
arguments, templates or a trigger's stored state. There is nothing to connect here; the hook that tests a connection is
`headwater_airflow.hooks.connection`.
"""

from __future__ import annotations

from ipaddress import ip_address
from typing import TYPE_CHECKING, Any
from urllib.parse import quote, urlencode

if TYPE_CHECKING:
    from airflow.sdk import Connection


def connection_environment(conn_id: str) -> dict[str, str]:
    """For a task: the variable that the engine reads, with the connection as a libpq URI. Secret."""
    from airflow.sdk import BaseHook

    return _environment(conn_id, BaseHook.get_connection(conn_id))


def connection_uri(conn_id: str) -> str:
    """For a task: the Airflow connection as a libpq URI. Secret."""
    from airflow.sdk import BaseHook

    return libpq_uri(BaseHook.get_connection(conn_id))


async def async_connection_environment(conn_id: str) -> dict[str, str]:
    """The same for a trigger, whose event loop must not be blocked."""
    from airflow.sdk import BaseHook

    return _environment(conn_id, await BaseHook.aget_connection(conn_id))


def _environment(conn_id: str, connection: Connection) -> dict[str, str]:
    from headwater.pipeline_file.values import connection_variable

    return {connection_variable(conn_id): libpq_uri(connection)}


def libpq_uri(connection: Connection) -> str:
    """`connection` as libpq reads it. Extras that libpq does not know belong to other hooks and are left out."""
    user = quote(connection.login, safe="") if connection.login else ""
    password = f":{quote(connection.password, safe='')}" if connection.password else ""
    account = f"{user}{password}@" if user or password else ""
    # Of several hosts each gets the port: alone behind them all it would be the last one's.
    hosts = ",".join(_address(host, connection.port) for host in (connection.host or "").split(","))
    known = _libpq_options()
    options = {name: str(value) for name, value in _extras(connection).items() if name in known}
    query = f"?{urlencode(options, quote_via=quote)}" if options else ""
    return f"postgresql://{account}{hosts}/{quote(connection.schema or '', safe='')}{query}"


def _address(host: str, port: int | str | None) -> str:
    """As a URI has it; a port that stands behind `host` itself goes over `port`."""
    name, colon, own = host.rpartition(":")
    # Colons of their own have sockets (Cloud SQL's, say) and addresses of IP version 6.
    if colon and own.isdecimal() and not host.startswith(("/", "@")) and not _is_ipv6(host):
        host, port = name, own
    bare = host.removeprefix("[").removesuffix("]")
    quoted = f"[{quote(bare, safe=':')}]" if _is_ipv6(bare) else quote(host, safe="")
    return f"{quoted}:{port}" if port else quoted


def _is_ipv6(host: str) -> bool:
    try:
        return ip_address(host).version == 6
    except ValueError:
        return False


def _extras(connection: Connection) -> dict[str, Any]:
    return dict(connection.extra_dejson or {})


def _libpq_options() -> frozenset[str]:
    from psycopg import pq

    return frozenset(option.keyword.decode() for option in pq.Conninfo.get_defaults())
