"""`python -m headwater.cli`."""

from headwater.cli import main

raise SystemExit(main())
