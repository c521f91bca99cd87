"""`python -m headwater.jars`; the module is `headwater.spark.jars`."""

from headwater.spark.jars import main

if __name__ == "__main__":
    raise SystemExit(main())
