"""Who may see which pipeline: Airflow's auth manager decides, by the pipeline's own DAGs.

A pipeline is shown to those who may read its DAG `<pipeline>.replicate`; a wait of a task, to those who may read the
task's DAG; what is wrong with a file that gives no DAGs, to those who may see import errors. What a person may *do* is
not asked here: buttons call Airflow's own API.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import accumulate
from typing import Any

from airflow.api_fastapi.app import get_auth_manager
from airflow.api_fastapi.auth.managers.models.base_user import BaseUser
from airflow.api_fastapi.auth.managers.models.resource_details import AccessView, DagDetails
from airflow.models.dag import DagModel
from airflow.utils.session import create_session
from sqlalchemy import select

from headwater.pipeline_file.pipeline import Pipeline


def visible_pipelines(pipelines: Iterable[Pipeline], user: BaseUser) -> list[Pipeline]:
    """Those of `pipelines` whose replicating DAG `user` may read, by name."""
    by_dag = {f"{pipeline.name}.replicate": pipeline for pipeline in sorted(pipelines, key=lambda one: one.name)}
    readable = _readable(by_dag, user)
    return [pipeline for dag_id, pipeline in by_dag.items() if dag_id in readable]


def visible_waits(waits: Iterable[Mapping[str, Any]], user: BaseUser) -> list[Mapping[str, Any]]:
    """Those of `waits` (`headwater.lake.wait_log.WaitsOfOne`) that are of no task, or of a task whose DAG `user` may
    read."""
    dags_of = {wait["who"]: _perhaps_dags(wait["who"]) for wait in waits}
    named = set().union(*dags_of.values())
    if not named:
        return list(waits)
    with create_session() as session:
        existing = set(session.scalars(select(DagModel.dag_id).where(DagModel.dag_id.in_(named))))
    # Which of several it was nobody can tell: then all must be readable.
    dags_of = {who: dags & existing or dags for who, dags in dags_of.items()}
    readable = _readable(set().union(*dags_of.values()), user)
    return [wait for wait in waits if dags_of[wait["who"]] <= readable]


def _perhaps_dags(who: str) -> set[str]:
    """What may be the DAG in `<dag>.<task>`: the ids of both may have dots. Nothing of a waiter that is no task, whose
    name has blanks (`wait on <host>`)."""
    return set() if " " in who else set(accumulate(who.split(".")[:-1], "{}.{}".format))


def _readable(dag_ids: Iterable[str], user: BaseUser) -> set[str]:
    """Those of `dag_ids` that `user` may read; it need not exist."""
    wanted = list(dag_ids)
    teams = DagModel.get_dag_id_to_team_name_mapping(wanted) if wanted else {}
    manager = get_auth_manager()
    return {
        dag_id
        for dag_id in wanted
        if manager.is_authorized_dag(
            method="GET", details=DagDetails(id=dag_id, team_name=teams.get(dag_id)), user=user
        )
    }


def may_see_faults(user: BaseUser) -> bool:
    """Whether `user` may see what is wrong with pipeline files: it is an import error of a DAG file, too."""
    return bool(get_auth_manager().is_authorized_view(access_view=AccessView.IMPORT_ERRORS, user=user))
