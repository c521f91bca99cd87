"""The one place that builds Spark: which jars, which settings, and why each of them.

`job_session` serves one of Headwater's jobs in its own process, started by `python`, by the command line or by
spark-submit; `build_session` serves any program. `submit_conf` (any job), `job_conf` (Headwater's own) and
`submit_environment` are what a SparkSubmitOperator passes on. Only sessions import pyspark, so this module costs
nothing where Airflow parses DAG files.

`lake`: the root of the lake that is read, or any place in one. Only for a lake in an object store a session needs
anything beside (`headwater.spark.stores`).

Four kinds of settings. *Delta's* are what any Spark needs for tables of the lake: its jars, its extension, its
catalog, and commits that overwrite nobody's. *Launch* settings must be known before the JVM starts. *Required* settings
decide what Headwater stores and reads: they hold in sessions that are built here, and in no others. *Tuning* is of
Headwater's own jobs, and gives way to what spark-submit or spark-defaults.conf says.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import functools
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING

from headwater.errors import Refused
from headwater.spark.jars import LOG_STORE, jar_paths
from headwater.spark.java import require_java
from headwater.spark.parent_watch import watch_parent
from headwater.spark.stores import enter, has_class, in_store, jars_for, log_stores_for, redaction_for, require_jars

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

SHORT_LIVED_JVM = "-XX:TieredStopAtLevel=1 -XX:ReservedCodeCacheSize=256m -XX:+UseSerialGC -XX:MetaspaceSize=256m"
"""JDK_JAVA_OPTIONS for a demo or a test: in a JVM's first minutes compiling for the long run costs more than it saves
(a MERGE of 1,000 rows: 3.6 against 6 CPU-seconds). A driver that runs for hours is better off without. Spark's classes
take 170 MB: each time that a smaller limit is reached the whole heap is collected, five times in the first minute."""

SparkOnDemand = Callable[[], "SparkSession"]
"""Gives its caller a session, and starts Spark if nobody has needed it so far."""

_JVM_END_SECONDS = 20.0
_building = threading.Lock()
"""Of the process's one session: a job and the driver beside it may ask for it at once."""
_DELTA_EXTENSION = "io.delta.sql.DeltaSparkSessionExtension"
_LOG_STORE = "spark.delta.logStore.file.impl"
_LOG_STORE_OF_ALL = "spark.delta.logStore.class"

_EXTENSIONS = "spark.sql.extensions"
_CATALOG = {"spark.sql.catalog.spark_catalog": "org.apache.spark.sql.delta.catalog.DeltaCatalog"}
_REQUIRED = {
    **_CATALOG,
    # Any other zone shifts dates, and makes each commit to a small table rebuild its state (75 -> 973 ms).
    "spark.sql.session.timeZone": "UTC",
    # `timestamp` is a point in time everywhere, as in the type table; PostgreSQL's zoneless one is timestamp_ntz.
    "spark.sql.timestampType": "TIMESTAMP_LTZ",
    # Years before 1582 and 1900 as they are: proleptic Gregorian, no rebase, and never the deprecated INT96.
    "spark.sql.parquet.outputTimestampType": "TIMESTAMP_MICROS",
    "spark.sql.parquet.datetimeRebaseModeInWrite": "CORRECTED",
    "spark.sql.parquet.datetimeRebaseModeInRead": "CORRECTED",
    "spark.sql.parquet.int96RebaseModeInWrite": "CORRECTED",
    "spark.sql.parquet.int96RebaseModeInRead": "CORRECTED",
    # A file that is missing or damaged is an error: skipped, its rows would be missing without a word.
    "spark.sql.files.ignoreCorruptFiles": "false",
    "spark.sql.files.ignoreMissingFiles": "false",
    # Delta refuses a version whose commit is older than the retention, even when it was current a second ago: that
    # would refuse a fresh cut of a quiet table. Our own pins decide what vacuum may take.
    "spark.databricks.delta.vacuum.enforceTimeTravelWithinDeletedFileRetentionDuration": "false",
}

_SMALL = {
    # Planning again while running, and many partitions, cost more than the work itself.
    "spark.sql.shuffle.partitions": "2",
    "spark.sql.adaptive.enabled": "false",
}
"""While a job reads no more than `_SMALL_BYTES` of a table's files."""
_SMALL_BYTES = 256 << 20
_STATE_TASKS = "spark.databricks.delta.snapshotPartitions"
"""How many tasks list the files of a table. Delta's own 50 are for a cluster: on one machine they cost seconds for each
table that is read first."""
_TUNING = {
    _STATE_TASKS: "1",
    # The default of 100 compiles the same plans again and again as soon as there are many tables.
    "spark.sql.codegen.cache.maxEntries": "20000",
    "spark.sql.execution.arrow.pyspark.enabled": "true",
    "spark.ui.enabled": "false",
    "spark.ui.showConsoleProgress": "false",
    "spark.log.level": "WARN",
}


def submit_conf(lake: str = "") -> dict[str, str]:
    """What any Spark needs for tables of the lake, as `spark-submit --conf` takes it: nothing that tunes it, and
    nothing secret."""
    return {
        "spark.jars": ",".join([*jar_paths(), *jars_for(lake)]),
        _EXTENSIONS: _DELTA_EXTENSION,
        **_CATALOG,
        # Delta's own may take the place of an entry that another program has put there at the same moment.
        _LOG_STORE: LOG_STORE,
        **log_stores_for(lake),
        **redaction_for(lake),
    }


def job_conf(lake: str = "") -> dict[str, str]:
    """What one of Headwater's own jobs needs before its JVM starts; the rest it sets itself."""
    memory = os.environ.get("HEADWATER_DRIVER_MEMORY")
    return {
        **submit_conf(lake),
        **({"spark.driver.memory": memory} if memory else {}),
        "spark.driver.extraJavaOptions": f"-Dlog4j2.configurationFile={_log4j_file()}",
        "spark.pyspark.python": _executor_python(),
        "spark.pyspark.driver.python": sys.executable,
    }


def submit_environment() -> dict[str, str]:
    """Environment variables for spark-submit itself.

    Its shell scripts look for Spark beside the first python3 of PATH, so the `bin` folder of our own environment
    must come first there.
    """
    folder = str(Path(sys.executable).parent)
    path = os.environ.get("PATH", os.defpath)
    if path.split(os.pathsep)[0] != folder:
        path = folder + os.pathsep + path
    return {"PATH": path, "PYSPARK_PYTHON": _executor_python(), "PYSPARK_DRIVER_PYTHON": sys.executable}


def _executor_python() -> str:
    """Of executors on other machines, where ours may lie elsewhere; their minor version must be this one's."""
    return os.environ.get("HEADWATER_EXECUTOR_PYTHON") or sys.executable


class JobSpark:
    """Spark of one of Headwater's jobs, started when something first asks for it: what is small does without."""

    def __init__(self, pipeline_name: str, job: str, lake: str) -> None:
        self._job = pipeline_name, job, lake
        self._session: SparkSession | None = None
        self._starting = threading.Lock()

    def start(self) -> SparkSession:
        """What `job_session` says, from whichever thread."""
        with self._starting:
            if self._session is None:
                self._session = job_session(*self._job)
            return self._session

    def for_thread(self) -> SparkOnDemand:
        """A session of its own for one thread, made at its first call."""
        return functools.cache(lambda: for_thread(self.start()))


def for_thread(session: SparkSession) -> SparkSession:
    """A session for a thread of its own."""
    # Of a session of another program's it has that one's first settings and not those that it was brought to.
    return _with_required(session.newSession())


def _with_required(session: SparkSession) -> SparkSession:
    for name, value in _REQUIRED.items():
        if session.conf.isModifiable(name):
            session.conf.set(name, value)
    return session


def suit(session: SparkSession, frame: DataFrame | None = None) -> None:
    """The next queries are over `frame` (None: over little). Where it is large, Spark chooses plans and partitions as
    it does by itself. What spark-submit or spark-defaults.conf has set stays."""
    large = frame is not None and _bytes_of(frame) > _SMALL_BYTES
    given = session.sparkContext.getConf()
    for name, value in _SMALL.items():
        if given.contains(name):
            continue
        if large:
            session.conf.unset(name)
        else:
            session.conf.set(name, value)


def _bytes_of(frame: DataFrame) -> int:
    """As Spark estimates them: of a Delta table, of the files of the version that is read."""
    return int(frame._jdf.queryExecution().optimizedPlan().stats().sizeInBytes())


def cores_of(session: SparkSession) -> int | None:
    """Of a cluster as many as its settings let this application have; None: they do not say."""
    context = session.sparkContext
    if str(context.master).startswith("local"):
        return int(context.defaultParallelism)
    given = context.getConf()
    if (most := given.get("spark.cores.max")) is not None:
        return int(most)
    executors = given.get("spark.dynamicAllocation.maxExecutors") or given.get("spark.executor.instances")
    each = given.get("spark.executor.cores")
    return int(executors) * int(each) if executors and each and executors.isdigit() else None


def job_session(pipeline_name: str, job: str, lake: str) -> SparkSession:
    """`build_session` for one of Headwater's own jobs, tuned for tables that are small; see `suit`."""
    with _building:
        session = _session(pipeline_name, f"headwater {job}", lake, _TUNING)
    suit(session)
    return session


def build_session(
    pipeline_name: str | None = None,
    app_name: str = "headwater",
    *,
    lake: str = "",
    tuning: Mapping[str, str] = MappingProxyType({}),
) -> SparkSession:
    """The process's Spark session: the running one, brought to the required settings, or a new one.

    `lake`: where it is to read, if that is an object store. `tuning`: settings of a new one that give way to what
    spark-submit and spark-defaults.conf say. Work in threads on `for_thread(session)`, which has settings of its own
    and shares all else. Without Java or jars: `Refused`.

    A process that one of Headwater's operators has started ends when its task is gone
    (`headwater.spark.parent_watch`): a task that is killed would leave it running beside the retry.
    """
    watch_parent()
    require_jars(lake)
    with _building:
        session = _session(pipeline_name, app_name, lake, tuning)
    enter(session, lake)
    return session


def _session(pipeline_name: str | None, app_name: str, lake: str, tuning: Mapping[str, str]) -> SparkSession:
    """As `build_session`. A lake in a store is read only behind `headwater.spark.stores.enter`: jobs that do not read
    it by Spark need nothing for it."""
    from pyspark import SparkConf, SparkContext
    from pyspark.sql import SparkSession

    if SparkContext._active_spark_context is not None:
        session = SparkSession.builder.getOrCreate()
        if _DELTA_EXTENSION not in (session.conf.get(_EXTENSIONS, "") or ""):
            raise Refused(
                "the running Spark session has no Delta Lake",
                code="no_delta",
                remedy=f"start it by headwater.session.build_session, or with {_EXTENSIONS}={_DELTA_EXTENSION}",
            )
        return _with_required(session)

    submitted = "PYSPARK_GATEWAY_PORT" in os.environ
    settings = {**job_conf(lake), **_REQUIRED, **tuning}
    if submitted:
        SparkContext._ensure_initialized()
        given = dict(SparkConf().getAll())
        settings = {name: value for name, value in settings.items() if name not in given} | _REQUIRED
        extensions = given.get(_EXTENSIONS, "")
        if _DELTA_EXTENSION not in extensions:
            settings[_EXTENSIONS] = f"{extensions},{_DELTA_EXTENSION}".lstrip(",")
        for name, log_store in {_LOG_STORE: LOG_STORE, **log_stores_for(lake)}.items():
            if _LOG_STORE_OF_ALL in given or not has_class(SparkContext._jvm, log_store):
                # Submitted with other jars than ours. It reads all the same; commits are `require_exclusive`'s matter.
                settings.pop(name, None)
        master = given.get("spark.master", "")
    else:
        require_java()
        os.environ.update(submit_environment())
        master = os.environ.get("HEADWATER_SPARK_MASTER", "local[*]")
        settings["spark.master"] = master
        given = {}

    settings["spark.app.name"] = f"{app_name} {pipeline_name}" if pipeline_name else app_name
    if master.startswith("local"):
        if _STATE_TASKS not in given and _STATE_TASKS not in os.environ.get("PYSPARK_SUBMIT_ARGS", ""):
            settings.setdefault(_STATE_TASKS, str(len(os.sched_getaffinity(0))))
        # Nobody else has business with this driver; a host name that does not resolve must not matter either.
        for name in ("spark.driver.host", "spark.driver.bindAddress"):
            if name not in given:
                settings[name] = "127.0.0.1"
    elif "spark.dynamicAllocation.enabled" not in given:
        # A driver that replicates for hours needs executors now and then: they are free for others in between.
        settings["spark.dynamicAllocation.enabled"] = "true"
    work = _work_folder()
    if "spark.sql.warehouse.dir" not in given:
        settings["spark.sql.warehouse.dir"] = Path(work, "warehouse").as_uri()
    if "spark.local.dir" not in given:
        settings["spark.local.dir"] = work
    # Registered before the start: a start that fails must leave nothing behind either.
    atexit.register(_end, os.getpid(), work)

    builder = SparkSession.builder
    for name, value in settings.items():
        builder = builder.config(name, value)
    with _interrupts_kept():
        session = builder.getOrCreate()
    if not _has_delta(session):
        session.stop()
        raise Refused(
            "Spark was started without the Delta Lake jars",
            code="no_jars",
            remedy=f"add to spark-submit: --jars {','.join([*jar_paths(), *jars_for(lake)])}",
        )
    if submitted:  # the task that has submitted it links there, whatever the job logs
        context = session.sparkContext
        page = f", its UI at {context.uiWebUrl}" if context.uiWebUrl else ""
        print(f"Spark application {context.applicationId}{page}", file=sys.stderr, flush=True)
    return session


def require_exclusive(session: SparkSession, place: str) -> None:
    """Before a commit of ours to the table at `place`: Refused when Spark could take another writer's entry away by it,
    and in an object store, where nothing of ours commits by Spark: whoever comes here should have said so before."""
    if in_store(place) is not None:
        raise Refused(
            "Spark does not commit to an object store here",
            code="not_in_a_store",
            where=place,
            remedy="headwater load PIPELINE.yaml --table T --again, for the table of this folder, once the folder is "
            "removed there",
        )
    if session.conf.get(_LOG_STORE, "") != LOG_STORE:
        raise Refused(
            "this Spark session could overwrite what another program commits to the same table at the same moment",
            code="no_log_store",
            where="Spark session",
            remedy="let Headwater start Spark; or start it with the jars and settings of "
            f"headwater.session.submit_conf(), {_LOG_STORE}={LOG_STORE} among them",
        )


@contextlib.contextmanager
def _interrupts_kept() -> Iterator[None]:
    """PySpark puts its own handler of Ctrl-C, which cancels all jobs, in the place of the command's clean stop."""
    before = signal.getsignal(signal.SIGINT)
    try:
        yield
    finally:
        if before is not None and threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, before)


def _has_delta(session: SparkSession) -> bool:
    return has_class(session._jvm, "io.delta.tables.DeltaTable")


def _work_folder() -> str:
    """A new folder for Spark's own files; those that killed processes left behind are removed on the way.

    A living owner holds a lock on its folder, which ends with the process, however it ends.
    """
    for left in Path(tempfile.gettempdir()).glob("headwater-spark-*"):
        # Locked: in use; not ours to open: another user's. Both are OSErrors.
        with contextlib.suppress(OSError), (left / "owner").open("r+") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            shutil.rmtree(left)
    work = tempfile.mkdtemp(prefix="headwater-spark-")
    owner = os.open(os.path.join(work, "owner"), os.O_RDWR | os.O_CREAT, 0o600)  # open, and locked, until the end
    fcntl.flock(owner, fcntl.LOCK_EX)
    return work


def _log4j_file() -> str:
    return Path(__file__).with_name("log4j2.properties").as_uri()


def _end(owner: int, work: str) -> None:
    """Ends Spark, with a JVM that this process started, and removes its folder: nothing stays behind."""
    if os.getpid() != owner:
        return  # a forked child: the session is not its own
    from pyspark import SparkContext
    from pyspark.sql import SparkSession

    gateway = SparkContext._gateway
    process = getattr(gateway, "proc", None)
    # A JVM that hangs must not keep this process for ever: whatever is asked of it below ends with it.
    deadline = threading.Timer(_JVM_END_SECONDS, _kill, (process,))
    deadline.daemon = True
    deadline.start()
    try:
        if SparkContext._active_spark_context is not None:
            SparkSession.builder.getOrCreate().stop()
        if gateway is not None and process is not None:
            gateway.shutdown()
            process.stdin.close()
            process.wait()
    except Exception as error:  # the process is ending: there is no caller left to raise to
        print(f"headwater: Spark did not end cleanly: {error}", file=sys.stderr)
    finally:
        deadline.cancel()
        shutil.rmtree(work, ignore_errors=True)


def _kill(process: subprocess.Popen[bytes] | None) -> None:
    if process is not None:
        print(f"headwater: the JVM (process {process.pid}) did not end and is killed", file=sys.stderr)
        process.kill()
