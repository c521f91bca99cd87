"""The pipeline file, for programs of other people; the module is `headwater.pipeline_file.pipeline`."""

from headwater.pipeline_file.pipeline import BadPipelineFile as BadPipelineFile
from headwater.pipeline_file.pipeline import Pipeline as Pipeline
from headwater.pipeline_file.pipeline import TableEntry as TableEntry
from headwater.pipeline_file.pipeline import load_pipeline as load_pipeline
from headwater.pipeline_file.pipeline import parse_pipeline as parse_pipeline
