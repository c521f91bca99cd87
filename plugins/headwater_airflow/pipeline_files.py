"""The pipeline files that a pattern matches: the usable ones, and what is wrong with the others.

The same for the DAG factory and the pages: what has DAGs has a page, and a faulty file leaves the others alone.
"""

from __future__ import annotations

import glob

from headwater.errors import BadConfiguration, HeadwaterError
from headwater.pipeline_file.pipeline import Pipeline, load_pipeline


def read_pipelines(pattern: str) -> tuple[list[Pipeline], list[HeadwaterError]]:
    """The pipelines of the usable files, and what is wrong with the others; `where` of each fault names its file."""
    pipelines: dict[str, Pipeline] = {}
    faults: list[HeadwaterError] = []
    for file in sorted(glob.glob(pattern)):
        try:
            pipeline = load_pipeline(file)
        except HeadwaterError as error:
            faults.append(error)
            continue
        if (first := pipelines.setdefault(pipeline.name, pipeline)) is not pipeline:
            message = f"{first.file} has the same pipeline name, {pipeline.name}"
            faults.append(BadConfiguration(message, where=file, remedy="rename one of the two"))
    return list(pipelines.values()), faults
