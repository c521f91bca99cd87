"""Operators: Spark jobs (`spark`; what they share, `spark_job`; one's own, `on_cut`), holding replication for a load
(`replication`), SQL at the source whose commit can be waited for (`source`), and a choice by freshness (`branch`)."""
