"""A command of your own that reads a cut: dbt, a notebook, a script in another environment than Airflow's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from airflow.providers.standard.operators.bash import BashOperator
from airflow.sdk.exceptions import AirflowFailException

from headwater_airflow import lineage
from headwater_airflow.operators.on_cut import cut_file

if TYPE_CHECKING:
    from airflow.providers.openlineage.extractors import OperatorLineage
    from airflow.sdk import Context

CUT_FILE = "HEADWATER_CUT"


class BashOnCutOperator(BashOperator):  # type: ignore[misc]  # the provider is not typed
    """A BashOperator whose command finds the path of a file with the cut in the variable HEADWATER_CUT.

    `cut` is what a FreshnessSensor returned (`sensor.output`), but none that fell back to the source. `env` adds to the
    environment of the task and does not replace it.
    """

    env: dict[str, str] | None
    template_fields: Sequence[str] = (*BashOperator.template_fields, "cut")

    def __init__(self, *, cut: Any, **arguments: Any) -> None:
        super().__init__(append_env=True, **arguments)
        self.cut = cut

    def execute(self, context: Context) -> Any:
        if isinstance(self.cut, dict) and "fallback" in self.cut:
            raise AirflowFailException(
                "this cut fell back to the source, which only headwater.read on Spark can read: use "
                'SparkOnCutOperator, or another on_timeout than "fallback" for the sensor'
            )
        with cut_file(self.cut) as file:
            self.env = {**(self.env or {}), CUT_FILE: file}
            return super().execute(context)

    def get_openlineage_facets_on_start(self) -> OperatorLineage:
        return lineage.read_cut(self.cut)
