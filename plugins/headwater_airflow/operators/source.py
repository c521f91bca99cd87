"""SQL at the source whose commit can be waited for in the lake."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk import BaseOperator
from airflow.sdk.exceptions import AirflowException, AirflowFailException

from headwater_airflow.hooks.source import connection_uri

if TYPE_CHECKING:
    from airflow.sdk import Context

    from headwater.source.connection import Connection

_CANCEL_SECONDS = 5.0


class CommitAtSourceOperator(BaseOperator):
    """Runs `sql` (one text or several) at the source in one transaction. XCom: the position of its commit.

    Hand it to a sensor (`require=write.output`): the sensor's cut then holds what was written here, and reads wait for
    nothing that was committed later. `conn_id`: an Airflow connection of the role that writes, which need not be the
    pipeline's own. `parameters` for psycopg's placeholders, the same for every statement. When a try fails after the
    commit, the next one runs the statements again. A task that is killed or times out ends the statement that runs.
    """

    template_fields: Sequence[str] = ("sql", "parameters", "conn_id")
    template_ext: Sequence[str] = (".sql",)
    template_fields_renderers = {"sql": "sql"}  # noqa: RUF012  # Airflow declares it as an attribute of instances

    def __init__(
        self,
        *,
        conn_id: str,
        sql: str | Sequence[str],
        parameters: Sequence[Any] | Mapping[str, Any] | None = None,
        **arguments: Any,
    ) -> None:
        super().__init__(**arguments)
        self.conn_id = conn_id
        self.sql = sql
        self.parameters = parameters
        self._session: Connection | None = None

    def execute(self, context: Context) -> dict[str, Any]:
        from headwater.errors import HeadwaterError, Refused
        from headwater.source.connection import connect
        from headwater.source.samples import commit_position

        statements = [self.sql] if isinstance(self.sql, str) else list(self.sql)
        try:
            connection = connect(connection_uri(self.conn_id), application_name="headwater commit")
            with contextlib.closing(connection) as session:
                self._session = session
                try:
                    # The role's own settings: those of a connection that copies values are not a writer's.
                    session.execute("reset all")
                    with session.transaction():
                        for statement in statements:
                            cursor = session.execute(statement.encode(), self.parameters)
                            self.log.info("%s", cursor.statusmessage)
                    position = commit_position(session)
                finally:
                    self.on_kill()  # Airflow's time-out is an exception, raised while the statement runs
        except HeadwaterError as error:
            raise (AirflowFailException if isinstance(error, Refused) else AirflowException)(str(error)) from None
        self.log.info("committed at or before %s", position)
        return position.to_json()

    def on_kill(self) -> None:
        """Ends the statement that runs: if its connection is merely closed, the server goes on with it to its end."""
        import psycopg

        session = self._session
        if session is not None and session.info.transaction_status is psycopg.pq.TransactionStatus.ACTIVE:
            with contextlib.suppress(psycopg.Error):
                session.cancel_safe(timeout=_CANCEL_SECONDS)
