"""`headwater check --install-ddl-markers`: event triggers at the source that say in the log what DDL does."""

from __future__ import annotations

import contextlib
from typing import Any

from headwater.log.framing import DDL_PREFIX
from headwater.pipeline_file.pipeline import Pipeline
from headwater.source.connection import connect
from headwater.source.publication.ddl_markers import install, statements


def ddl_markers(pipeline: Pipeline, *, told: bool) -> dict[str, Any]:
    """The SQL, which is run only if `told`."""
    if told:
        with contextlib.closing(connect(pipeline.conninfo(), application_name="headwater check")) as connection:
            install(connection, DDL_PREFIX)
    # All or none: were one to fail, the next would make a trigger with whatever function is there.
    whole = ["BEGIN", *statements(DDL_PREFIX), "COMMIT"]
    return {"sql": "".join(f"{statement};\n" for statement in whole), "installed": told}
