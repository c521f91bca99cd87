"""A few of the soak's rounds: jobs of every kind started together on one pipeline, some of them killed."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from fixtures.bank import replicated_bank
from headwater.demo.postgres import EmbeddedServer
from soak.drivers_together import Rounds

if TYPE_CHECKING:
    from pyspark.sql import SparkSession

pytestmark = [pytest.mark.postgres, pytest.mark.spark]


def test_jobs_that_start_together_and_die_leave_one_holder_of_each_lease_and_the_lake_exact(
    postgres: EmbeddedServer, spark: SparkSession, tmp_path: Path
) -> None:
    with replicated_bank(postgres, tmp_path, seed=23) as bank:
        rounds = Rounds(bank, spark, driver_seconds=10)
        told = [rounds.run(seed) for seed in (1, 2)]
        assert any(succeeded for _, succeeded in told), told
