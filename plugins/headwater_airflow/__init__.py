"""What Airflow imports of Headwater: operators, sensors, triggers, hooks, the DAG factory.

Nothing is loaded here. With `plugins_folder` pointing at a checkout, the engine lies beside it and is put on the
path (at its end: an installed `headwater` wins).
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path


def _find_engine_of_checkout() -> None:
    engine = Path(__file__).resolve().parents[2] / "spark_jobs"
    if importlib.util.find_spec("headwater") is None and (engine / "headwater").is_dir():
        sys.path.append(str(engine))


_find_engine_of_checkout()
