"""Who may see which pipeline: Airflow's auth manager decides, by the pipeline's own DAGs.

A pipeline is shown to those who may read its DAG `<pipeline>.replicate`; what is wrong with a file that gives no DAGs,
to those who may see import errors. What a person may *do* is not asked here: buttons call Airflow's own API.
"""

from __future__ import annotations

from collections.abc import Iterable

from airflow.api_fastapi.app import get_auth_manager
from airflow.api_fastapi.auth.managers.models.base_user import BaseUser
from airflow.api_fastapi.auth.managers.models.resource_details import AccessView, DagDetails
from airflow.models.dag import DagModel

from headwater.pipeline_file.pipeline import Pipeline


def visible_pipelines(pipelines: Iterable[Pipeline], user: BaseUser) -> list[Pipeline]:
    """Those of `pipelines` whose replicating DAG `user` may read, by name."""
    by_dag = {f"{pipeline.name}.replicate": pipeline for pipeline in sorted(pipelines, key=lambda one: one.name)}
    if not by_dag:
        return []
    teams = DagModel.get_dag_id_to_team_name_mapping(list(by_dag))
    manager = get_auth_manager()
    return [
        pipeline
        for dag_id, pipeline in by_dag.items()
        if manager.is_authorized_dag(
            method="GET", details=DagDetails(id=dag_id, team_name=teams.get(dag_id)), user=user
        )
    ]


def may_see_faults(user: BaseUser) -> bool:
    """Whether `user` may see what is wrong with pipeline files: it is an import error of a DAG file, too."""
    return bool(get_auth_manager().is_authorized_view(access_view=AccessView.IMPORT_ERRORS, user=user))
