"""Example of a downstream job: reads one consistent cut and writes revenue per region.

    spark-submit headwater_example_aggregate.py CUT.json OUTPUT

The result replaces the Delta table at OUTPUT; each row says up to which position it is exact.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

SMALL_TABLES = {
    # Delta reads each table's log in 50 tasks, which for small tables is most of the job.
    "spark.databricks.delta.snapshotPartitions": "2",
    "spark.log.level": "WARN",
}


def main(cut_file: str, output: str) -> int:
    from pyspark.sql import functions as f

    import headwater
    from headwater.spark.session import build_session

    cut = json.loads(Path(cut_file).read_text(encoding="utf-8"))
    lake = cut["tables"]["public.orders"]["path"] or ""  # one in an object store is read by a connector of its own
    spark = build_session(app_name="headwater example", lake=lake, tuning=SMALL_TABLES)
    tables = headwater.read(spark, cut)
    revenue = (
        tables["public.order_lines"]
        .join(tables["public.orders"].withColumnRenamed("id", "order_id"), "order_id")
        .join(tables["public.customers"].withColumnRenamed("id", "customer_id"), "customer_id")
        .groupBy("region")
        .agg(
            f.count_distinct("order_id").alias("orders"),
            f.sum("quantity").alias("items"),
            f.sum(f.col("quantity") * f.col("price")).alias("revenue"),
        )
        .withColumn("position", f.lit(cut["position"]["lsn"]))
    )
    revenue.coalesce(1).write.format("delta").mode("overwrite").save(output)
    print(json.dumps({"output": output, "position": cut["position"]["lsn"]}))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
