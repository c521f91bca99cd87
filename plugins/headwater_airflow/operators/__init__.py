"""Operators: Spark jobs (`spark`), holding replication for a load (`replication`), SQL at the source whose commit can
be waited for (`source`), and a choice by freshness (`branch`)."""
