"""`python -m headwater.java`; the module is `headwater.spark.java`."""

from headwater.spark.java import main

if __name__ == "__main__":
    raise SystemExit(main())
