"""Pins what `azurite/package.json` asks for, anew: versions and digests of npm, and no address of anybody.

`npm install --package-lock-only` writes where each author takes gifts and keeps a licence; none of it is needed to
install, and it is no business of a pin.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

LOCK = Path(__file__).with_name("azurite") / "package-lock.json"


def without_addresses(lock: dict[str, Any]) -> dict[str, Any]:
    packages = {
        path: {name: value for name, value in package.items() if "://" not in json.dumps(value)}
        for path, package in lock["packages"].items()
    }
    return {**lock, "packages": packages}


def main() -> None:
    subprocess.run(["npm", "install", "--package-lock-only", "--ignore-scripts"], check=True, cwd=LOCK.parent)
    LOCK.write_text(json.dumps(without_addresses(json.loads(LOCK.read_text())), indent=2, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
