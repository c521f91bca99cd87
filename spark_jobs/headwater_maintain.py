"""Spark job: `headwater maintain`, for spark-submit. Takes the command's own arguments."""

from __future__ import annotations

import sys

from headwater.cli import main
from headwater.spark.parent_watch import watch_parent

if __name__ == "__main__":
    watch_parent()
    raise SystemExit(main(["maintain", *sys.argv[1:]]))
