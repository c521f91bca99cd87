"""The way of a commit by Spark's MERGE, for tables that only Delta's own writer may write."""
