"""Waiting for a fresh cut, without Spark.

A `request` says what is asked for. A `waiter` is one wait, a look at a time: what it is for (`target`,
`wanted_partitions`), when it asks the source (`visits`), whether the lake holds it (`judgement`, `validated_cuts`),
what it hands out at the end (`ending`, `result`). Waits of one process share what they see (`lookout`, `source_state`,
`kept_readers`).

`wait` blocks, for the command and for Python. `on_timeout` is for callers that go on without a fresh cut. `progress`
and `speed` say how far a wait is. `movements` is for those who wait for tables to move, and for no position.
"""
