"""How Spark reads a lake in an object store: by Hadoop's connector for it, which is told what the pipeline file and the
environment say of the store (`headwater.store_options`).

A session that is started for such a lake has the connector's jars, if they have been fetched (`python -m headwater.jars
--s3`, `--azure`); one for a lake on disk has none of them. How the store is entered is said to the running context,
whose Hadoop configuration goes to executors with each read: no secret is on a command line or among Spark's settings,
and what Spark's UI shows of that configuration has no values under such names (`spark.redaction.regex`).

There are connectors for S3 and Azure (docs/decisions/0061). Elsewhere what only Spark can read is refused; loads,
replication and waits do without.

Nothing of Headwater's commits by Spark in a store (`headwater.spark.session.require_exclusive`). What another program
commits by a session that was built here goes by a conditional PUT (`PutLogStore.java`), as the engine's own commits do:
Delta's own log store for S3 would let two writers of the same moment succeed, without a word.
"""

from __future__ import annotations

import re
import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from headwater import store_options
from headwater.errors import Refused
from headwater.lake_root import is_remote, place_of
from headwater.spark.jars import STORE_LOG_STORE, store_jar_paths

if TYPE_CHECKING:
    from collections.abc import Mapping

    from pyspark.sql import SparkSession

_GIVEN: Final = "spark.hadoop."
_AZURE_ENTRY: Final = tuple(
    f"spark.hadoop.fs.azure.{name}" for name in ("account.auth", "account.key", "account.oauth", "sas.")
)
"""How the settings begin that say how an account is entered."""
_REDACTION: Final = "spark.redaction.regex"
_REDACTED_BY_SPARK: Final = "(?i)secret|password|token|access[.]?key"
"""Spark's default: it would show the key of an Azure account."""
_told: dict[str, Mapping[str, str]] = {}
"""By bucket or account, what the JVM of this process was told last."""
_telling = threading.Lock()


@dataclass(frozen=True, slots=True)
class _Connector:
    """`store`: by that name its jars are fetched; `file_system`: the class that shows whether a session has them."""

    store: str
    title: str
    file_system: str

    @property
    def fetching(self) -> str:
        return f"run `python -m headwater.jars --{self.store}`, then start again"


_CONNECTORS: Final = {
    "s3": _Connector("s3", "S3", "org.apache.hadoop.fs.s3a.S3AFileSystem"),
    "abfss": _Connector("azure", "Azure's storage", "org.apache.hadoop.fs.azurebfs.AzureBlobFileSystem"),
}


def jars_for(lake: str) -> list[str]:
    """The paths of the jars that a session needs to read `lake`; none where they have not been fetched: most jobs do
    without."""
    connector = _connector_of(lake)
    return store_jar_paths(connector.store) if connector is not None else []


def log_stores_for(lake: str) -> dict[str, str]:
    """Settings by which Spark's commits in S3 exclude others. Elsewhere Delta's own stay, not tried beside ours."""
    return {f"spark.delta.logStore.{scheme}.impl": STORE_LOG_STORE for scheme in ("s3a", "s3")} if _is_s3(lake) else {}


def redaction_for(lake: str) -> dict[str, str]:
    """The setting by which Spark shows no secret of the lake's store, where its default does not do."""
    return {_REDACTION: f"{_REDACTED_BY_SPARK}|account[.]key"} if lake.startswith("abfss://") else {}


def require_jars(place: str) -> None:
    """Refused where Spark could not read what lies at `place`, whatever session it had."""
    path = in_store(place)
    if path is None:
        return
    connector = _connector_of(path)
    if connector is None:
        raise Refused(
            f"Spark has no connector for {path.partition(':')[0]}:// here",
            code="no_connector",
            where=path,
            remedy="let the lake lie on disk, in S3 or in Azure for what reads by Spark: validate, headwater.read, "
            "views, and verify, rebuild and clustered reloads of large tables; loads, replicate and waits do without",
        )
    if not store_jar_paths(connector.store):
        raise Refused(
            f"the jars by which Spark reads in {connector.title} are missing",
            code="no_jars",
            where=path,
            remedy=connector.fetching,
        )


def enter(session: SparkSession, place: str) -> None:
    """From now on the session reads what lies in the store of `place`. Refused where it has no connector; nothing
    happens for a place on disk, or one that is not known here, nor to the server behind a session of Spark Connect:
    that is its owner's to say."""
    path = in_store(place)
    if path is None or is_connect(session):
        return
    connector = _connector_of(path)
    if connector is None or not has_class(session._jvm, connector.file_system):
        require_jars(path)
        assert connector is not None
        raise Refused(
            f"this Spark session was started without the jars by which it reads in {connector.title}",
            code="no_jars",
            where=path,
            remedy=f'start it by headwater.session.build_session(lake="{path}"), or add to spark-submit: '
            f"--jars {','.join(store_jar_paths(connector.store))}",
        )
    conf: Any = session.sparkContext._jsc.hadoopConfiguration()
    given = dict(session.sparkContext.getConf().getAll())
    # What spark-submit or spark-defaults.conf says stays: of Azure how the account is entered, as a whole.
    theirs = any(name.startswith(_AZURE_ENTRY) for name in given)
    told = {
        name: value
        for name, value in store_options.of(path).hadoop(path).items()
        if _GIVEN + name not in given and not (theirs and (_GIVEN + name).startswith(_AZURE_ENTRY))
    }
    _refuse_to_show(told, given.get(_REDACTION, _REDACTED_BY_SPARK), path)
    store = "/".join(path.replace("s3://", "s3a://").split("/")[:3])
    with _telling:
        before = _told.get(store, told)
        for name in before.keys() - told.keys():
            conf.unset(name)  # a token of keys that had one
        for name, value in told.items():
            conf.set(name, value)
        if before != told:
            _exchange_file_system(session, store, conf)
        _told[store] = told  # behind an exchange that failed the next one tries again


def _exchange_file_system(session: SparkSession, store: str, conf: Any) -> None:
    """Hadoop keeps a file system for each bucket, and that one keeps the keys that it was made with: another one takes
    its place. It is not closed, since other threads may be reading by it. Executors of a cluster have their own."""
    gateway: Any = session.sparkContext._gateway
    file_systems, uri = gateway.jvm.org.apache.hadoop.fs.FileSystem, gateway.jvm.java.net.URI(store)
    arguments = gateway.new_array(gateway.jvm.java.lang.Object, 3)
    arguments[0], arguments[1], arguments[2] = uri, conf, file_systems.newInstance(uri, conf)
    # If it were removed, a query that has the old keys could make it again.
    methods = gateway.jvm.java.lang.Class.forName("org.apache.hadoop.fs.FileSystem").getDeclaredMethods()
    put = next(method for method in methods if method.getName() == "addFileSystemForTesting")
    put.setAccessible(True)
    put.invoke(None, arguments)


def _refuse_to_show(told: Mapping[str, str], redacted: str, path: str) -> None:
    """Refused where Spark's UI would show a secret that it is told."""
    for name in told:
        if name.startswith("fs.azure.account.key.") and re.search(redacted, name) is None:
            setting = next(iter(redaction_for(path).items()))
            raise Refused(
                "this Spark session would show the key of the account in its UI and its event log",
                code="bad_configuration",
                where=path,
                remedy=f'start it by headwater.session.build_session(lake="{path}"), or with {"=".join(setting)}',
            )


def is_readable(session: SparkSession, place: str) -> bool:
    """Whether `enter` would let it read there."""
    try:
        enter(session, place)
    except Refused:
        return False
    return True


def no_commit(place: str, table: str, why: str) -> dict[str, Any] | None:
    """What an error says of a table that only Spark could write, and that lies in a store; None: it lies on disk."""
    if in_store(place) is None:
        return None
    return {
        "message": f"only Spark could write it ({why}), and Spark does not commit to an object store here",
        "code": "not_in_a_store",
        "where": table,
        "remedy": f"headwater load PIPELINE.yaml --table {table} --again, once {place} is removed there",
    }


def is_connect(session: SparkSession) -> bool:
    """Whether it is a session of Spark Connect, which speaks to a server and has no JVM here."""
    return type(session).__module__.startswith("pyspark.sql.connect")


def has_class(jvm: Any, name: str) -> bool:
    from py4j.java_gateway import JavaClass

    found = jvm
    for part in name.split("."):
        found = getattr(found, part, None)
    return isinstance(found, JavaClass)


def in_store(place: str) -> str | None:
    """The one way to write it. None: it does not lie in a store."""
    try:
        path = place_of(place)
    except ValueError:
        return None
    return path if is_remote(path) else None


def _connector_of(place: str) -> _Connector | None:
    return _CONNECTORS.get(place.partition("://")[0])


def _is_s3(place: str) -> bool:
    return place.startswith("s3://")
