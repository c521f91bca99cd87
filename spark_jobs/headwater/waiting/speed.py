"""How fast a pipeline is, what limits it, and when it will have caught up: from the rates in its position file."""

from __future__ import annotations

from typing import Any, Final

from headwater.lake.freshness import LOG_RATE, SOURCE_RATE

BEHIND_SECONDS: Final = 5.0
"""A living pipeline that is further behind is catching up."""
_LIMIT: Final = 0.5
"""A stage busy for less of its time limits nothing."""

_MEASURES: Final = {"_bytes_per_second": "rate", "_busy": "busy", "_seconds": "latency_seconds"}


def speed(
    rates: dict[str, float], lag_bytes: int | None, lag_seconds: float | None, *, running: bool
) -> dict[str, Any]:
    """`stages` (rate in bytes of log a second while busy, busy share, part of the newest epoch's latency),
    `bottleneck`, `catching_up`, and `eta_seconds` until the lag is gone; None when nothing can be said, or when the
    source writes as fast as its log is applied. Without a driver (`running`) the stages are those of its end."""
    stages = by_stage(rates)
    catching_up = running and lag_seconds is not None and lag_seconds > BEHIND_SECONDS
    return {
        "stages": stages,
        "bottleneck": bottleneck(stages) if running else None,
        "catching_up": catching_up,
        "eta_seconds": _eta(rates, lag_bytes) if catching_up else None,
    }


def by_stage(rates: dict[str, float]) -> dict[str, dict[str, float | None]]:
    """`<stage>_bytes_per_second`, `<stage>_busy` and `<stage>_seconds` of the position file, by stage."""
    stages: dict[str, dict[str, float | None]] = {}
    for name, value in rates.items():
        for suffix, measure in _MEASURES.items():
            if name.endswith(suffix):
                stages.setdefault(name.removesuffix(suffix), dict.fromkeys(_MEASURES.values()))[measure] = value
    return stages


def bottleneck(stages: dict[str, dict[str, float | None]]) -> str | None:
    """The busiest stage, if it is busy for half of its time; None: the source is the slow one, or idle."""
    busiest = max(stages, key=lambda name: stages[name]["busy"] or 0.0, default=None)
    return busiest if busiest is not None and (stages[busiest]["busy"] or 0.0) >= _LIMIT else None


def _eta(rates: dict[str, float], lag_bytes: int | None) -> float | None:
    gain = rates.get(LOG_RATE, 0.0) - rates.get(SOURCE_RATE, 0.0)
    return round(lag_bytes / gain, 1) if lag_bytes and gain > 0 else None
