"""Spark for programs of other people; the module is `headwater.spark.session`."""

from headwater.spark.session import build_session as build_session
from headwater.spark.session import submit_conf as submit_conf
from headwater.spark.session import submit_environment as submit_environment
