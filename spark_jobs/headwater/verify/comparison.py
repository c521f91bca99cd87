"""Comparing source and lake of one table: which keys differ at a first look, and how they stand at later ones."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import pyarrow as pa

from headwater.spark.session import SparkOnDemand
from headwater.verify.by_spark import SparkComparison
from headwater.verify.candidates import Candidates
from headwater.verify.in_memory import MemoryComparison
from headwater.verify.settle import State
from headwater.verify.sides import Sides


class Comparison(Protocol):
    """Of both sides of one table. What it has found only itself can look at again."""

    multiset: bool
    """Without a key, or insert-only, both sides are multisets of rows; a row is a key then."""

    def first_look(self, sides: Sides, limit: int) -> tuple[int, Candidates]:
        """How many rows the source has, and the keys that differ, `limit` of them with their values. Each side is read
        once."""

    def look_again(self, sides: Sides, candidates: Candidates, numbers: Sequence[int]) -> dict[int, State]:
        """The state of the keys `numbers`; those on neither side are left out."""

    def source_rows(self, sides: Sides, candidates: Candidates, numbers: Sequence[int]) -> pa.Table:
        """Of a multiset, each of the rows `numbers` that the source has, once, with its number (`INDEX`) last."""


def comparison_of(sides: Sides, spark: SparkOnDemand) -> Comparison:
    """In this process where both sides are small; else by Spark, which is started for it."""
    return MemoryComparison(sides.schema) if sides.few else SparkComparison(spark(), sides.schema)
