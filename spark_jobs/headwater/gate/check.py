"""`headwater check`: everything that would stop a pipeline, found at once, with nothing changed anywhere.

An unreachable source is `SourceUnreachable` (exit 1) and a refused log-in `Refused`: without a session there is
nothing to report on. The other jobs begin with `require_ok`, so that they refuse before they change anything.
Runs without Spark: imports only what PostgreSQL and the pipeline file need, and delta-rs where a lake exists.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import TYPE_CHECKING, Any

from headwater.columns.shape import is_rebuildable, options_for_a_load, options_for_a_rebuild, ways_to_find_rows
from headwater.delta import storage
from headwater.delta.log_entries import log_path
from headwater.errors import Refused, SourceChanged
from headwater.gate.renamed import renamed_problems
from headwater.gate.wal_ceiling import BY_ITSELF, REMEDY
from headwater.lake.paths import control_path, ledger_path, registry_path, table_path
from headwater.names import TableName, quote_ident
from headwater.pipeline_file.pipeline import Pipeline
from headwater.source.catalog.catalog import Catalog, CatalogTable, read_catalog
from headwater.source.connection import Connection, connect, errors_named, identify
from headwater.source.problems import Problem, error, refuse_errors, warning
from headwater.source.publication.parts import PublishedPart
from headwater.source.publication.rights import missing_publications, publishing_problems, slot_order_problems
from headwater.source.publication.row_filters import wanted_parts
from headwater.source.settings import server_problems, version_problems
from headwater.source.slot import PLUGIN, gap_behind, read_slot

if TYPE_CHECKING:
    from headwater.lake.registry import TableRecord

__all__ = ["CheckReport", "Problem", "check", "lake_problems", "registry_problems", "require_ok"]

APPLICATION_NAME = "headwater"
_NO_RIGHTS = "correct lake.root and lake.storage, or give this user the right to read and write all that is there"


@dataclass(frozen=True, slots=True)
class CheckReport:
    """`problems` in the order server, lake, tables, publications. `catalog` holds what can be replicated,
    `parts` what of these tables is to be published. `is_loaded`: whether anything was ever loaded, as far as the lake
    can be asked."""

    problems: tuple[Problem, ...]
    catalog: Catalog
    parts: dict[TableName, PublishedPart] = field(default_factory=dict)
    is_loaded: bool = False

    @property
    def ok(self) -> bool:
        """Whether there are no errors; warnings do not count."""
        return not any(problem.is_error for problem in self.problems)

    def faulty(self) -> dict[str, str]:
        """By table what keeps it from being replicated, where something does that is wrong with it alone."""
        found: dict[str, str] = {}
        for problem in self.problems:
            if problem.is_error and (name := self.owner_of(problem)):
                found[name] = "; ".join([*filter(None, [found.get(name)]), problem.message])
        return found

    def owner_of(self, problem: Problem) -> str:
        """The table that is wrong, where it or a partition of it is; empty: it is something else."""
        for one in self.catalog.judged:
            if problem.where == str(one.relation.name) or problem in one.problems:
                return str(one.relation.name)
        return problem.where if problem.code == "table_missing" else ""

    def to_json(self) -> dict[str, Any]:
        return {"ok": self.ok, "problems": [problem.to_json() for problem in self.problems]}


def check(pipeline: Pipeline) -> CheckReport:
    """All that is wrong with source, lake and file together. See the module for what is raised instead."""
    conninfo, lake = pipeline.conninfo(), pipeline.lake_path()
    with connect(conninfo, application_name=APPLICATION_NAME, statement_timeout=60.0) as connection:
        return inspect(connection, pipeline, lake)


@errors_named("source")
def inspect(connection: Connection, pipeline: Pipeline, lake: str) -> CheckReport:
    """`check` over a session that is there; `lake`: the path of its root."""
    if too_old := version_problems(connection):
        return CheckReport(tuple(too_old), Catalog((), ()))  # its catalog lacks what the other checks ask for
    catalog = read_catalog(connection, pipeline)
    parts, filter_problems = wanted_parts(connection, catalog.tables)
    of_lake = lake_problems(lake, [table.name for table in catalog.tables])
    is_loaded = _is_loaded(lake, of_lake)
    registered = registry_problems(lake, pipeline, catalog) if is_loaded and not of_lake else []
    may_be_judged = is_loaded and not any(problem.is_error for problem in (*of_lake, *registered))
    problems = [
        *server_problems(connection, pipeline.source.slot, [APPLICATION_NAME]),
        *of_lake,
        *registered,
        *catalog.problems,
        *_unknown_excluded(catalog),
        *filter_problems,
        *publishing_problems(connection, pipeline.source.publication, catalog.tables, parts),
        *_slot_and_publications(connection, pipeline, is_loaded=is_loaded),
        *(_slot_and_source(connection, pipeline, lake) if may_be_judged else ()),
    ]
    # A table may be judged from several sides with the same result.
    return CheckReport(tuple(dict.fromkeys(problems)), catalog, parts, is_loaded)


def _is_loaded(root: str, of_lake: list[Problem]) -> bool:
    try:
        return storage.is_folder(registry_path(root))
    except OSError:
        if not of_lake:  # which say what is wrong with the store
            raise
        return False


def _slot_and_publications(connection: Connection, pipeline: Pipeline, *, is_loaded: bool) -> list[Problem]:
    """Whether a slot that somebody made can be read. Later on replicate reads it, and says so itself; before that,
    what will keep it from reading can still be mended."""
    problems = missing_publications if is_loaded else slot_order_problems
    return problems(connection, pipeline.source.slot, pipeline.source.publication)


def _slot_and_source(connection: Connection, pipeline: Pipeline, lake: str) -> list[Problem]:
    """Behind a load: whether this is the lake's source, and the slot delivers what follows the lake. A warning where
    replicate may go on by itself."""
    from headwater.gate.same_source import REPLICATE_SAYS, require_same_source
    from headwater.lake.ledger import read_epoch
    from headwater.lake.registry import Registry

    name = pipeline.source.slot
    registry, now = Registry.open(lake, pipeline.name), identify(connection)
    if registry is None or (known := registry.pipeline) is None or now.in_recovery:
        return []
    if not any(record.holds_rows for record in registry.tables.values()):
        return []  # a first load has yet to end, and makes what it needs
    slot, newest = read_slot(connection, name), read_epoch(lake)  # a driver confirms only what the ledger has
    try:
        # How its timelines branched only a log connection tells: replicate asks.
        require_same_source(connection, pipeline, replace(known, history=()), newest)
    except SourceChanged as changed:
        follows = pipeline.source.on_timeline_change == "follow" and now.system_id == known.system_id
        kind = warning if follows and changed.remedy == REPLICATE_SAYS else error
        return [kind(changed.code, changed.where, changed.message, changed.remedy)]
    fits = slot is None or (slot.plugin, slot.database) == (PLUGIN, connection.info.dbname)
    if not fits or (slot is not None and (slot.loss or slot.confirmed_lsn is None)):
        return []  # said already, or it is being made
    start = max(known.start_lsn, newest.position.lsn if newest is not None else 0)
    if not (gap := gap_behind(slot, start)):
        return []
    by_itself = pipeline.source.on_slot_loss == "repair"
    kind, remedy = (warning, BY_ITSELF) if by_itself else (error, REMEDY)
    return [kind("slot_gap", f"replication slot {name}", gap, remedy)]


def _unknown_excluded(catalog: Catalog) -> list[Problem]:
    """A typing error here would replicate what must stay at the source."""
    return [
        error("unknown_column", str(table.name), f"columns.exclude names {quote_ident(name)}, which it does not have")
        for table in catalog.tables
        for name in table.entry.columns.exclude
        if table.relation.attribute(name) is None
    ]


def require_ok(report: CheckReport, only: Collection[TableName] | None = None) -> None:
    """Raise `Refused` with all errors of `report` in one message; but for a slot that is lost or renamed in the file, a
    publication that is gone, another source, and damage to the lake, which the caller deals with. `only`: what is wrong
    with other tables than these is left out; None: nothing is."""
    others = report.faulty().keys() - set(map(str, only)) if only is not None else set()
    dealt_with = ("slot_lost", "slot_gap", "source_renamed", "source_changed", "publication_missing", "damaged_lake")
    refuse_errors(p for p in report.problems if p.code not in dealt_with and report.owner_of(p) not in others)


def lake_problems(root: str, tables: Iterable[TableName] = ()) -> list[Problem]:
    """Whether files can be made below `root`, and commits there exclude each other; of `tables`, one that is there is
    looked at. Leaves nothing behind."""
    if reason := storage.why_not_writable(root, _made_by_others(root, tables)):
        return [error("lake_not_writable", "lake.root", reason, _NO_RIGHTS)]
    if reason := storage.why_not_exclusive(root):
        remedy = "use a store that takes conditional writes: two drivers would overwrite each other's commits here"
        return [error("store_without_conditional_put", "lake.root", reason, remedy)]
    return []


def _made_by_others(root: str, tables: Iterable[TableName]) -> Iterator[str]:
    """A few folders below `root` that jobs make, perhaps as another user."""
    yield control_path(root)
    yield from map(log_path, (registry_path(root), ledger_path(root)))
    there = (path for name in tables if storage.is_folder(path := table_path(root, name.path)))
    yield from map(log_path, islice(there, 1))


def not_permitted(root: str, problem: OSError) -> Refused | None:
    """What `problem` is to a job, where this user has not all rights below `root`."""
    if reason := storage.why_not_permitted(root, problem):
        return Refused(reason, code="lake_not_writable", where="lake.root", remedy=_NO_RIGHTS)
    return None


def registry_problems(root: str, pipeline: Pipeline, catalog: Catalog) -> list[Problem]:
    """Whether a lake that exists under `root` is that of `pipeline`, in a format that this Headwater knows, and goes by
    the same slot and publication; and which options of `catalog`'s tables wait for a load."""
    # Where nothing was ever loaded nobody asks: delta-rs takes longer to import than all else here.
    from headwater.lake.registry import Registry

    try:
        registry = Registry.open(root, pipeline.name)
    except Refused as refused:
        return [error(refused.code, refused.where, refused.message, refused.remedy)]
    if registry is None:
        return []
    found = renamed_problems(pipeline, registry.pipeline) if registry.pipeline is not None else []
    for table in catalog.tables:
        record = registry.tables.get(str(table.name))
        if record is None or record.state not in ("active", "catching up", "suspended") or not record.schemas:
            continue
        where = str(table.name)
        for option in _options_for_a_load(pipeline, record, table):
            message = f"{option} is another than when the table was loaded, and holds from its next load on"
            remedy = f"headwater load PIPELINE.yaml --table {where} --again"
            found.append(warning("option_waits_for_load", where, message, remedy))
        if not _may_be_rebuilt(record, table):
            continue
        for option in options_for_a_rebuild(record.schema, table.schema):
            message = f"{option} is another than when the table was loaded, and holds from its next rebuild or load on"
            remedy = f"headwater rebuild PIPELINE.yaml --table {where}, while readers go on with the table as it is"
            found.append(warning("option_waits_for_rebuild", where, message, remedy))
    return found


def _options_for_a_load(pipeline: Pipeline, record: TableRecord, table: CatalogTable) -> Iterator[str]:
    yield from options_for_a_load(record.schema, table.schema)
    yield from ways_to_find_rows(record.schema, table.schema)
    if not _may_be_rebuilt(record, table):
        yield from options_for_a_rebuild(record.schema, table.schema)
    if record.on_divergence != pipeline.on_divergence_of(table.entry):
        yield "on_divergence"
    if record.on_schema_change != pipeline.on_schema_change_of(table.entry):
        yield "on_schema_change"


def _may_be_rebuilt(record: TableRecord, table: CatalogTable) -> bool:
    """Else `headwater rebuild` would refuse, and only a load brings any option about."""
    return record.state != "suspended" and is_rebuildable(record.schema, table.schema)
