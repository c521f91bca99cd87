"""A choice by freshness: one branch for a lake that is fresh enough, another for one that is not."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from airflow.sdk import BranchMixIn

from headwater_airflow.sensors.freshness import FreshnessSensor, sentence

if TYPE_CHECKING:
    from airflow.sdk import Context


class FreshnessBranchOperator(FreshnessSensor, BranchMixIn):
    """Waits as a FreshnessSensor does, at most `max_wait` (0: one look), then follows `if_fresh` or `if_not_fresh`.

    Each names tasks or task groups directly downstream (None: none of them). XCom: the cut, or, on the other branch,
    how the wait ended. A refusal (exit status 2: a bad table name, a position in the future) still fails the task.
    """

    inherits_from_skipmixin = True

    def __init__(
        self,
        *,
        pipeline: str | os.PathLike[str],
        if_fresh: str | Sequence[str] | None,
        if_not_fresh: str | Sequence[str] | None,
        max_wait: Any = 0,
        **arguments: Any,
    ) -> None:
        if "on_timeout" in arguments:
            raise ValueError("on_timeout: what happens when the lake is not fresh is `if_not_fresh` here")
        # Said here, or a DAG's default_args would say it.
        super().__init__(pipeline=pipeline, max_wait=max_wait, on_timeout="fail", **arguments)
        self.if_fresh = if_fresh
        self.if_not_fresh = if_not_fresh

    def _is_plain(self) -> bool:
        return False  # a branch is chosen in a worker

    def _ended(self, event: dict[str, Any], context: Context) -> dict[str, Any]:
        from headwater.errors import EXIT_NOT_FRESH, EXIT_SUSPENDED

        fresh = event.get("outcome") == "satisfied"
        if not fresh and event["exit_status"] not in (EXIT_NOT_FRESH, EXIT_SUSPENDED):
            return super()._ended(event, context)
        self.log.info("fresh" if fresh else sentence(event))
        result = {name: value for name, value in event.items() if name != "exit_status"}
        # Before the choice, which ends the task by an exception.
        context["ti"].xcom_push(key="return_value", value=result)
        self.do_branch(context, self.if_fresh if fresh else self.if_not_fresh)
        return result
