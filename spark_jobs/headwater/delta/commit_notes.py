"""What commits of ours say of themselves in their `commitInfo`: the version they were planned on, and why.

Commits that Headwater writes itself have the reason among their parameters. Delta's own, of Spark, have the user
metadata alone for what we want to say: both stand there.
"""

from __future__ import annotations

from typing import Any

USER_METADATA = "spark.databricks.delta.commitInfo.userMetadata"
"""The setting of a session whose value its commits say."""
_PLANNED_ON = "headwater planned on "


def note(version: int, because: str = "") -> str:
    """The user metadata of a commit that was planned on `version`."""
    return f"{_PLANNED_ON}{version}: {because}" if because else f"{_PLANNED_ON}{version}"


def planned_on(info: dict[str, Any]) -> int | None:
    """The version that the commit was planned on; None if it is not ours, or does not say."""
    said = str(info.get("userMetadata") or "")
    return int(said.removeprefix(_PLANNED_ON).partition(":")[0]) if said.startswith(_PLANNED_ON) else None


def reason(info: dict[str, Any]) -> str | None:
    """Why the commit was made as it was; None if it is not ours, or does not say."""
    because = (info.get("operationParameters") or {}).get("because")
    if because is None and planned_on(info) is not None:
        because = info["userMetadata"].partition(": ")[2]
    return str(because) if because else None
