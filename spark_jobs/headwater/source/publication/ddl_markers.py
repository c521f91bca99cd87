"""Event triggers at the source that say in the log itself that DDL was run, and which relations it wrote anew.

A rewrite by `ALTER TABLE ... TYPE ... USING` sends no row, and may leave names and types as they were. The message is
transactional: DDL that is rolled back says nothing. PostgreSQL documentation, "Event Triggers" and
`pg_logical_emit_message`.
"""

from __future__ import annotations

import contextlib
from typing import Any, Final

from psycopg import errors as pg

from headwater.errors import Refused
from headwater.log.framing import DDL_PREFIX
from headwater.pipeline_file.pipeline import Pipeline
from headwater.source.connection import Connection, connect, errors_named

_OF_VALUES: Final = 1 | 2 | 4
"""Reasons of a rewrite that make values, or hide them: SET UNLOGGED (what is written until SET LOGGED is in no log), a
default of a new column, a type. Not an access method."""
_TAGS: Final = "'ALTER TABLE', 'DROP TABLE', 'ALTER SCHEMA', 'DROP INDEX', 'ALTER PUBLICATION', 'DROP PUBLICATION'"


def statements() -> list[str]:
    """What installs them, once or again: to be run by a superuser in the source's database. The message's
    content is the id of a relation that was written anew, or nothing."""
    return [
        "DROP EVENT TRIGGER IF EXISTS headwater_ddl",
        "DROP EVENT TRIGGER IF EXISTS headwater_rewrite",
        # Whoever owned schema or function could put other words into what every DDL runs, a superuser's too: replacing
        # a function leaves it its owner.
        "CREATE SCHEMA IF NOT EXISTS headwater_ddl",
        "ALTER SCHEMA headwater_ddl OWNER TO CURRENT_USER",
        "DROP FUNCTION IF EXISTS headwater_ddl.mark()",
        f"""CREATE FUNCTION headwater_ddl.mark() RETURNS event_trigger
LANGUAGE plpgsql SET search_path = pg_catalog AS $$
BEGIN
  IF tg_event <> 'table_rewrite' THEN
    PERFORM pg_logical_emit_message(true, '{DDL_PREFIX}', '');
  ELSIF pg_event_trigger_table_rewrite_reason() & {_OF_VALUES} <> 0 THEN
    PERFORM pg_logical_emit_message(true, '{DDL_PREFIX}', pg_event_trigger_table_rewrite_oid()::text);
  END IF;
EXCEPTION WHEN OTHERS THEN
  RAISE WARNING 'headwater: %', SQLERRM;  -- nobody's DDL is to fail because of a message
END $$""",
        f"CREATE EVENT TRIGGER headwater_ddl ON ddl_command_end\nWHEN TAG IN ({_TAGS})\n"
        "EXECUTE FUNCTION headwater_ddl.mark()",
        "CREATE EVENT TRIGGER headwater_rewrite ON table_rewrite EXECUTE FUNCTION headwater_ddl.mark()",
        # DDL that a replica's role runs is in the log as any other.
        "ALTER EVENT TRIGGER headwater_ddl ENABLE ALWAYS",
        "ALTER EVENT TRIGGER headwater_rewrite ENABLE ALWAYS",
    ]


def install(connection: Connection) -> None:
    """Run the statements, all or none of them. Refused to a role that may not."""
    try:
        with errors_named("source"), connection.transaction():
            for statement in statements():
                connection.execute(statement)
    except (Refused, pg.InsufficientPrivilege) as reason:
        raise Refused(
            f"the role may not make event triggers: {reason}",
            code="missing_rights",
            where=f"database {connection.info.dbname}",
            remedy="a superuser runs what headwater check PIPELINE.yaml --install-ddl-markers prints",
        ) from None


def ddl_markers(pipeline: Pipeline, *, told: bool) -> dict[str, Any]:
    """`headwater check --install-ddl-markers`: the SQL, which is run only if `told`."""
    if told:
        with contextlib.closing(connect(pipeline.conninfo(), application_name="headwater check")) as connection:
            install(connection)
    # All or none: were one to fail, the next would make a trigger with whatever function is there.
    whole = ["BEGIN", *statements(), "COMMIT"]
    return {"sql": "".join(f"{statement};\n" for statement in whole), "installed": told}
