"""The jars that Delta Lake adds to Spark: named and pinned here, fetched once by `python -m headwater.jars`; and one of
our own, made from its sources by the same command (docs/decisions/0045). With `--s3` also those by which Spark reads
in S3 (`s3_jars.txt` beside this module, docs/decisions/0056), with `--azure` the one for Azure's storage (0061).

PySpark brings all that these four need at run time. Resolving Delta with its declared dependencies would fetch 33
jars (87 MB), most of them second copies of what Spark has; its Unity Catalog jars are not loaded unless such a
catalog is configured. Fetching is left to Spark's own Ivy, so repositories and proxies are configured as for any
Spark job (`spark.jars.ivySettings` in spark-defaults.conf).
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import os
import sys
import tempfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from headwater.errors import HeadwaterError, Refused, Transient
from headwater.spark.java import require_java


@dataclass(frozen=True, slots=True)
class Jar:
    """One artifact of the public Maven repositories."""

    group: str
    artifact: str
    version: str
    sha256: str

    @property
    def file_name(self) -> str:
        return f"{self.artifact}-{self.version}.jar"


JARS = (
    Jar(
        "io.delta",
        "delta-spark_4.2_2.13",
        "4.4.0",
        "27d4fd8b1f879535c573ed1c718177d6a27f24d3e626ba02e216369725721ead",
    ),
    Jar("io.delta", "delta-storage", "4.4.0", "c46735481fa8e326b0957be02b4420cbcab4b325bb08009b7f2045a95133f1cc"),
    Jar("io.delta", "delta-kernel-api", "4.4.0", "ee9b5a14ac3b7efdff4d61a58478fe8eb0e5a3fbca43889dca7290795fe79a11"),
    Jar(
        "io.delta",
        "delta-kernel-defaults",
        "4.4.0",
        "225c975199e4718b38ee5b7e6da7f19e9585024262b2cec2656b32151a856b0b",
    ),
)

_AZURE_JARS = (
    Jar(
        "org.apache.hadoop", "hadoop-azure", "3.5.0", "220b5db238b82437960e4b81c7e3eefa4eff2a03ad502887497f11d0ad86e663"
    ),
)
STORES = {"s3": "a lake in S3 (13 MB)", "azure": "a lake in Azure's storage (0.6 MB)"}
"""The stores that there are connectors for, and what the jars of each are for."""

LOG_STORE = "headwater.LinkLogStore"
"""The class by which Spark puts entries into a table's log without ever taking another one's place."""
STORE_LOG_STORE = "headwater.PutLogStore"
"""The same in S3."""
_SOURCES = tuple(
    Path(__file__).resolve().parents[1] / f"{name.rpartition('.')[2]}.java" for name in (LOG_STORE, STORE_LOG_STORE)
)
_S3_JARS = Path(__file__).with_name("s3_jars.txt")
_EARLIEST = (1980, 1, 1, 0, 0, 0)


def jars_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """Where the jars lie: $HEADWATER_JARS, else `.jars` of the checkout, else (installed) the user's cache."""
    if environ.get("HEADWATER_JARS"):
        return Path(environ["HEADWATER_JARS"]).absolute()
    checkout = Path(__file__).resolve().parents[3]
    if (checkout / "pyproject.toml").is_file():
        return checkout / ".jars"
    cache = environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(cache) / "headwater" / "jars"


@cache
def store_jars(store: str) -> tuple[Jar, ...]:
    """Hadoop's connector for one of `STORES`, with what it needs."""
    if store == "azure":
        return _AZURE_JARS
    lines = _S3_JARS.read_text(encoding="utf-8").splitlines()
    return tuple(Jar(*line.split()) for line in lines if line and not line.startswith("#"))


def log_store_jar() -> str:
    """The file name of our own jar: another one as soon as its sources are."""
    digest = hashlib.sha256(b"".join(source.read_bytes() for source in _SOURCES)).hexdigest()
    return f"headwater-log-store-{digest[:12]}.jar"


def jar_paths() -> list[str]:
    """The jars' paths, for `spark.jars`; `Refused` when they have not been fetched."""
    folder = jars_folder()
    paths = [*(folder / jar.file_name for jar in JARS), folder / log_store_jar()]
    if not all(path.is_file() for path in paths):
        raise Refused(
            "the Delta Lake jars are missing",
            code="no_jars",
            where=str(folder),
            remedy="run `make setup` in a checkout, else `python -m headwater.jars`",
        )
    return [str(path) for path in paths]


def store_jar_paths(store: str) -> list[str]:
    """The paths of the jars for one of `STORES`; none, unless all have been fetched."""
    folder = jars_folder()
    paths = [folder / jar.file_name for jar in store_jars(store)]
    return [str(path) for path in paths] if all(path.is_file() for path in paths) else []


def fetch(jars: Iterable[Jar] = JARS) -> list[str]:
    """Fetches what is missing or damaged of `jars`, makes our own jar, and returns the file names that are new.

    Each jar appears whole or not at all, so a second run, or one that was killed, does no harm.
    """
    folder = jars_folder()
    missing = [jar for jar in jars if not _is_intact(folder / jar.file_name, jar)]
    own = folder / log_store_jar()
    if not missing and own.is_file():
        return []
    require_java()
    folder.mkdir(parents=True, exist_ok=True)
    # On the same file system as the target: the move at the end must be a rename.
    with tempfile.TemporaryDirectory(prefix=".fetch-", dir=folder) as work, _jvm(Path(work)) as jvm:
        for jar, path in zip(missing, _resolve(jvm, missing), strict=True):
            if not _is_intact(path, jar):
                raise Refused(
                    f"{jar.group}:{jar.artifact}:{jar.version} is not the file that was pinned (its SHA-256 differs)",
                    code="bad_jar",
                    remedy="find out what stands between this machine and the Maven repository; nothing was kept",
                )
            os.replace(path, folder / jar.file_name)
        made = Path(work, own.name)
        _make_log_store(jvm, [folder / jar.file_name for jar in JARS], made)
        os.replace(made, own)
    return [*(jar.file_name for jar in missing), own.name]


def _is_intact(path: Path, jar: Jar) -> bool:
    return path.is_file() and hashlib.sha256(path.read_bytes()).hexdigest() == jar.sha256


@contextlib.contextmanager
def _jvm(work: Path) -> Iterator[Any]:
    """A JVM with Spark's own jars while the block runs; Ivy's talk goes to a log below `work`, shown when it fails."""
    from py4j.protocol import Py4JError
    from pyspark import SparkConf
    from pyspark.errors import PySparkException
    from pyspark.java_gateway import launch_gateway

    log_path = work / "ivy.log"
    conf = SparkConf(loadDefaults=False).set("spark.jars.ivy", str(work / "ivy"))
    with log_path.open("wb") as log:
        try:
            gateway = launch_gateway(conf, {"stdout": log, "stderr": log})  # type: ignore[no-untyped-call]
            try:
                yield gateway.jvm
            finally:
                gateway.shutdown()
                gateway.proc.stdin.close()
                gateway.proc.wait()
        except (Py4JError, PySparkException) as error:
            tail = "\n".join([*log_path.read_text(errors="replace").splitlines(), *str(error).splitlines()][-20:])
            raise Transient(
                f"the jars could not be fetched by Spark's Ivy, or ours not be made of its source:\n{tail}",
                code="no_jars",
                remedy="see that this machine reaches a Maven repository, then run it again",
            ) from error


def _resolve(jvm: Any, jars: Iterable[Jar]) -> list[Path]:
    """Downloads `jars`, without their dependencies."""
    found = []
    for jar in jars:
        uri = f"ivy://{jar.group}:{jar.artifact}:{jar.version}?transitive=false"
        paths = jvm.org.apache.spark.util.DependencyUtils.resolveMavenDependencies(jvm.java.net.URI(uri))
        found.append(Path(paths.head()))
    return found


def _make_log_store(jvm: Any, needed: Iterable[Path], jar: Path) -> None:
    """Compiles our log stores against the jars `needed`. By Janino, which Spark has for its own generated code: a JDK
    need not be there."""
    none = jvm.java.lang.reflect.Array.newInstance(jvm.java.lang.Class.forName("java.net.URL"), 0)  # no list for py4j
    parent = jvm.java.lang.Thread.currentThread().getContextClassLoader()
    loader = jvm.org.apache.spark.util.MutableURLClassLoader(none, parent)
    for path in needed:
        loader.addURL(jvm.java.net.URL(path.as_uri()))
    classes: dict[str, Any] = {}
    for source in _SOURCES:
        compiler = jvm.org.codehaus.janino.SimpleCompiler()
        compiler.setParentClassLoader(loader)
        compiler.cook(source.read_text(encoding="utf-8"))
        classes |= compiler.getBytecodes()
    with zipfile.ZipFile(jar, "w", zipfile.ZIP_DEFLATED) as archive:
        for name in sorted(classes):
            # The same jar at every making.
            entry = zipfile.ZipInfo(f"{name.replace('.', '/')}.class", _EARLIEST)
            archive.writestr(entry, bytes(classes[name]))


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m headwater.jars", description="Fetches what Spark needs.")
    for store, what in STORES.items():
        parser.add_argument(f"--{store}", action="store_true", help=f"also what Spark needs to read {what}")
    wanted = vars(parser.parse_args(arguments))
    try:
        fetched = fetch([*JARS, *(jar for store in STORES if wanted[store] for jar in store_jars(store))])
    except HeadwaterError as error:
        print(error, file=sys.stderr)
        return error.exit_status
    for name in fetched:
        print(f"fetched {name}", file=sys.stderr)
    print(f"{'the jars are' if fetched else 'all jars were there already,'} in {jars_folder()}", file=sys.stderr)
    return 0
