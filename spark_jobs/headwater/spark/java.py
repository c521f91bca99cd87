"""The Java that Spark runs on: found the way Spark's own scripts find it, and checked before anything needs it.

Spark 4.2 needs a full Java 17 or newer; without one its own message is a page of shell errors. Only the standard
library is used here: `make setup` runs this module before anything is installed.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Mapping

from headwater.errors import Refused

OLDEST_JAVA = 17
_VERSION = re.compile(r'version "(?:1\.)?(\d+)')
_REMEDY = "install a full Java 17 or 21 (on Debian: openjdk-17-jre-headless) and have it in PATH or in JAVA_HOME"


def require_java(environ: Mapping[str, str] = os.environ) -> str:
    """The path of a Java that Spark can run on; `Refused`, with one sentence, when there is none.

    JAVA_HOME wins over PATH, as in Spark's scripts: it is used even when it is the worse of the two.
    """
    home = environ.get("JAVA_HOME")
    java = os.path.join(home, "bin", "java") if home else shutil.which("java", path=environ.get("PATH", os.defpath))
    if java is None or not os.access(java, os.X_OK):
        where = f"JAVA_HOME ({home}) has no bin/java" if home else "there is no java in PATH"
        raise Refused(f"Spark needs Java, and {where}", code="no_java", remedy=_REMEDY)
    # A Java that was trimmed for embedding lacks this module, and Spark's launcher asks for it.
    command = [java, "--add-modules", "jdk.incubator.vector", "-version"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    if result.returncode == 0:
        version = _VERSION.search(result.stderr)
        if version is None or int(version[1]) >= OLDEST_JAVA:
            return java
        raise _too_old(java, version[1])
    plain = subprocess.run([java, "-version"], capture_output=True, text=True, check=False)
    version = _VERSION.search(plain.stderr)
    if version is not None and int(version[1]) < OLDEST_JAVA:
        raise _too_old(java, version[1])
    raise Refused(f"{java} cannot start, or is not a full Java", code="no_java", remedy=_REMEDY)


def _too_old(java: str, version: str) -> Refused:
    return Refused(
        f"Spark needs Java {OLDEST_JAVA} or newer, and {java} is Java {version}", code="no_java", remedy=_REMEDY
    )


def main() -> int:
    try:
        require_java()
    except Refused as refused:
        print(refused, file=sys.stderr)
        return refused.exit_status
    return 0
