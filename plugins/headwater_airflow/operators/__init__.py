"""Operators: Spark jobs (`spark`), and holding replication for a load (`replication`)."""
