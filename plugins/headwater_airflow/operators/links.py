"""The links from a task of Headwater's: to the page of its pipeline, and to what Spark shows of its job."""

from __future__ import annotations

from typing import TYPE_CHECKING
from urllib.parse import quote

from airflow.sdk import BaseOperatorLink

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator
    from airflow.sdk.types import TaskInstanceKey

_PAGE = "/plugin/headwater/headwater/pipelines/"
"""The plugin's view in the UI, and in it the page's own address."""


class PipelinePageLink(BaseOperatorLink):
    """For operators that say by `pipeline_name()` which pipeline is theirs."""

    name = "Pipeline"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey | None = None) -> str:
        from airflow.sdk.configuration import conf

        name = operator.pipeline_name()  # type: ignore[attr-defined]
        return f"{conf.get('api', 'base_url', fallback='').rstrip('/')}{_PAGE}{quote(name, safe='')}"


class SparkPageLink(BaseOperatorLink):
    """For operators that say by `spark_page()` where Spark shows their job; None: nowhere."""

    name = "Spark UI"

    def get_link(self, operator: BaseOperator, *, ti_key: TaskInstanceKey | None = None) -> str | None:  # type: ignore[override]
        page: str | None = operator.spark_page()  # type: ignore[attr-defined]
        return page
