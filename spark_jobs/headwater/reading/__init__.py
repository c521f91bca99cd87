"""Reading cuts: by Spark, by Arrow, as views."""
