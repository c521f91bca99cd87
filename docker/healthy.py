"""Ends with 0 if Airflow says that its service named by the only argument is healthy: `scheduler`, `triggerer`,
`dag_processor`, or `metadatabase`, which stands for the API server itself.

Asked of the API server, which knows each service's heartbeat: `airflow jobs check` would load all of Airflow for it.
"""

from __future__ import annotations

import json
import sys
import urllib.request

with urllib.request.urlopen("http://api-server:8080/api/v2/monitor/health", timeout=5) as answer:
    raise SystemExit(json.load(answer)[sys.argv[1]]["status"] != "healthy")
