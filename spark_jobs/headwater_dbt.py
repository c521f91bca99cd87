"""dbt on Spark: the tables of a cut are its sources.

    spark-submit headwater_dbt.py CUT.json build --project-dir DIR [...]

The profile's method is `session`: dbt works in this program's Spark session. In it each table of the cut is a view in
a database that is named after its schema at the source: `source('public', 'orders')` is the table at the cut's version.
Ends with 0 if dbt has succeeded, 5 if a model or a test failed, 1 otherwise.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

_FAILED, _ENDED_OTHERWISE = 5, 1
# dbt asks for the session before each statement, of which Spark warns each time.
_QUIET = {"spark.log.level": "ERROR", "spark.ui.showConsoleProgress": "false"}


def main(cut_file: str, *arguments: str) -> int:
    from dbt.cli.main import dbtRunner

    import headwater
    from headwater.spark.session import build_session

    cut = json.loads(Path(cut_file).read_text(encoding="utf-8"))
    place = next((table["path"] for table in cut["tables"].values() if table["path"]), "")
    spark = build_session(app_name="headwater dbt", lake=place, tuning=_QUIET)
    # A catalog that outlives the session keeps the views: they are pinned as long as the next run may take to come.
    headwater.views(spark, cut)
    done = dbtRunner().invoke(list(arguments))
    if done.exception is not None:
        print(f"dbt ended with an error: {done.exception}", file=sys.stderr)
        return _ENDED_OTHERWISE
    return 0 if done.success else _FAILED


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
