"""dbt on Spark: the tables of a cut are its sources.

    spark-submit headwater_dbt.py CUT.json build --project-dir DIR [...]

The profile's method is `session`: dbt works in this program's Spark session. In it each table of the cut is a view in
a database that is named after its schema at the source: `source('public', 'orders')` is the table at the cut's version.
Ends with 0 if dbt has succeeded, 2 if the cut cannot be read, and 1 if a model or a test failed, or dbt did not begin:
Airflow tries that again.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from headwater.errors import HeadwaterError
from headwater.spark.parent_watch import watch_parent

# dbt asks for the session before each statement, of which Spark warns each time.
_QUIET = {"spark.log.level": "ERROR", "spark.ui.showConsoleProgress": "false"}


def main(cut_file: str, *arguments: str) -> int:
    from dbt.cli.main import dbtRunner

    import headwater
    from headwater.session import build_session

    cut = json.loads(Path(cut_file).read_text(encoding="utf-8"))
    place = next((table["path"] for table in cut["tables"].values() if table["path"]), "")
    try:
        spark = build_session(app_name="headwater dbt", lake=place, tuning=_QUIET)
        # Views of a catalog that lives on are pinned as long as the next run may take to come. Else the wait's own pin
        # of the cut is enough.
        lasting = spark.conf.get("spark.sql.catalogImplementation") == "hive"
        headwater.views(spark, cut, keep_cut="24h" if lasting else 0)
    except HeadwaterError as error:
        print(error, file=sys.stderr)
        print(json.dumps(error.to_json()))  # by which Airflow knows a refusal
        return error.exit_status
    done = dbtRunner().invoke(list(arguments))
    if done.exception is not None:
        print(f"dbt ended with an error: {done.exception}", file=sys.stderr)
    return 0 if done.success else 1


if __name__ == "__main__":
    watch_parent()
    sys.exit(main(*sys.argv[1:]))
