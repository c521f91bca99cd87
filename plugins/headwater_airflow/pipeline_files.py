"""The pipeline files that a pattern matches: the usable ones, and what is wrong with the others.

The same for the DAG factory and the pages: what has DAGs has a page, and a faulty file leaves the others alone.
"""

from __future__ import annotations

import glob
from pathlib import Path

from headwater.errors import BadConfiguration, HeadwaterError
from headwater.pipeline_file.pipeline import Pipeline, load_pipeline


def read_pipelines(pattern: str) -> tuple[list[Pipeline], list[HeadwaterError]]:
    """The pipelines of the usable files, and what is wrong with the others; `where` of each fault names its file.

    Of several files of one pipeline the one counts that is named after it, else the first: a copy that somebody has put
    beside it (`shop (copy).yaml`) is not to take the pipeline over, also while the file itself is faulty.
    """
    found: list[Pipeline] = []
    faults: list[HeadwaterError] = []
    faulty: dict[str, str] = {}
    for file in sorted(glob.glob(pattern)):
        try:
            found.append(load_pipeline(file))
        except HeadwaterError as error:
            faults.append(error)
            faulty[Path(file).stem] = f"{file} is named after the pipeline {Path(file).stem}, and is faulty"
    used: list[Pipeline] = []
    taken: dict[str, str] = {}
    for pipeline in sorted(found, key=lambda one: Path(one.file).stem != one.name):
        is_copy = Path(pipeline.file).stem != pipeline.name
        if why := taken.get(pipeline.name) or (faulty.get(pipeline.name) if is_copy else None):
            remedy = "remove one of the two, or give it another pipeline name"
            faults.append(BadConfiguration(why, where=pipeline.file, remedy=remedy))
        else:
            used.append(pipeline)
            taken[pipeline.name] = f"{pipeline.file} has the same pipeline name, {pipeline.name}"
    return sorted(used, key=lambda one: one.file), faults
