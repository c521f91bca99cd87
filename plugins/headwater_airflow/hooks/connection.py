"""The connection type `headwater`: how Airflow's form for a source is labelled, and its button that tests it.

A pipeline file names any connection (`airflow: <conn_id>`); of this type or of PostgreSQL's, it is read alike.
"""

from __future__ import annotations

from typing import Any

from airflow.sdk import BaseHook

from headwater_airflow.hooks.source import connection_uri

_ABOUT = (
    "select current_setting('server_version'), current_database(), current_user, current_setting('wal_level'),"
    " (select rolsuper or rolreplication from pg_roles where rolname = current_user)"
)


class SourceHook(BaseHook):
    """A PostgreSQL server that Headwater reads. What libpq knows, like `sslmode`, stands in the extra fields."""

    conn_name_attr = "headwater_conn_id"
    default_conn_name = "headwater_default"
    conn_type = "headwater"
    hook_name = "Headwater source (PostgreSQL)"

    def __init__(self, headwater_conn_id: str = default_conn_name, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.headwater_conn_id = headwater_conn_id

    @classmethod
    def get_ui_field_behaviour(cls) -> dict[str, Any]:
        return {
            "hidden_fields": [],
            "relabeling": {"schema": "Database", "login": "User"},
            "placeholders": {
                "port": "5432",
                "login": "headwater",
                "extra": '{"sslmode": "verify-full", "sslrootcert": "/etc/headwater/ca.crt"}',
            },
        }

    def test_connection(self) -> tuple[bool, str]:
        """Whether the server lets us in and its log can be read, and what it said. No message holds the password."""
        from headwater.errors import HeadwaterError
        from headwater.source.connection import connect

        try:
            with connect(connection_uri(self.headwater_conn_id), statement_timeout=10) as connection:
                about = connection.execute(_ABOUT.encode()).fetchone()
        except HeadwaterError as error:
            return False, str(error)
        assert about is not None
        version, database, user, wal_level, may_replicate = about
        there = f"PostgreSQL {version}, database {database}, as {user}"
        if wal_level != "logical":
            return False, f"{there}: wal_level is {wal_level}. What to do: set it to logical and restart the server"
        if not may_replicate:
            return False, f"{there}: the role may not replicate. What to do: ALTER ROLE ... REPLICATION"
        return True, f"{there}. What a pipeline needs besides, headwater check tells"
