"""The app behind the pages: JSON for the page's scripts, the pages themselves, and the metrics.

Nothing is answered without a user of Airflow's auth manager, by its cookie or by a bearer token, and nothing of a
pipeline that this user may not see (`headwater_airflow.page.access`). It only reads: what a page can start, it starts
through Airflow's own API, with the user's session. No answer holds a secret: messages of the engine carry none, and
what is known of connection strings is taken out of their texts once more.
"""

from __future__ import annotations

import hashlib
import html
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from airflow.api_fastapi.auth.managers.models.base_user import BaseUser
from airflow.api_fastapi.core_api.security import get_user
from fastapi import Depends, FastAPI, HTTPException, Request, Response
from fastapi.responses import HTMLResponse, JSONResponse
from starlette.staticfiles import StaticFiles

from headwater.errors import HeadwaterError
from headwater.monitor import metrics
from headwater_airflow.configuration import PIPELINES
from headwater_airflow.page.access import may_see_faults, visible_pipelines, visible_waits
from headwater_airflow.page.watches import GATHER_SECONDS, Watches

if TYPE_CHECKING:
    from headwater.monitor.overview import PipelineWatch
    from headwater.pipeline_file.pipeline import Pipeline
    from headwater.terminal.scrub import Scrubber

_STATIC = Path(__file__).parent / "static"
_SCRAPE_SECONDS = 8.0  # below Prometheus' ten
_SOURCE_SECONDS = 3.0  # of these: between two scrapes nobody may have asked the source
_FREE_TEXTS = frozenset({"reason", "remedy", "message", "what", "sentence"})
_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'self'; form-action 'none'; frame-ancestors 'self'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
}

User = Annotated[BaseUser, Depends(get_user)]


def create_app(watches: Watches | None = None) -> FastAPI:
    """The app; `watches` are the pipelines of $HEADWATER_PIPELINES unless given."""
    known = watches if watches is not None else Watches()
    static, version = StaticFiles(directory=_STATIC), static_version()
    document = (_STATIC / "index.html").read_text(encoding="utf-8")
    # The schema and its pages would be answered without a user.
    app = FastAPI(title="Headwater", openapi_url=None, docs_url=None, redoc_url=None, dependencies=[Depends(get_user)])

    @app.middleware("http")
    async def add_headers(request: Request, call_next: Callable[[Request], Awaitable[Response]]) -> Response:
        response = await call_next(request)
        for name, value in _HEADERS.items():
            response.headers[name] = value
        response.headers.setdefault("Cache-Control", "no-store")
        return response

    def answer(content: dict[str, Any]) -> JSONResponse:
        return JSONResponse(_scrubbed(content, known.scrubber))

    def pipeline_of(name: str, user: BaseUser) -> Pipeline:
        """404 also for what the user may not see: that it exists is told to nobody else."""
        for pipeline in visible_pipelines(known.pipelines(), user):
            if pipeline.name == name:
                return pipeline
        raise HTTPException(404, f"there is no pipeline {name}, or you may not read its DAG {name}.replicate")

    @app.get("/api/pipelines")
    def list_pipelines(user: User) -> JSONResponse:
        pipelines = {pipeline.name: pipeline for pipeline in visible_pipelines(known.pipelines(), user)}
        found = known.gather("overview", pipelines, lambda watch: watch.overview(), GATHER_SECONDS)
        shown = [_shown(name, pipelines[name].file, found.get(name)) for name in pipelines]
        trusted = may_see_faults(user)
        return answer(
            {
                "pipelines": shown,
                "faults": [_fault(error) for error in known.faults()] if trusted else [],
                "folder": known.folder if trusted else None,
                "setting": PIPELINES if known.folder is None else None,
            }
        )

    @app.get("/api/pipelines/{name}")
    def one_pipeline(name: str, user: User) -> JSONResponse:
        file = pipeline_of(name, user).file
        found = known.gather("details", [name], lambda watch: watch.details(), _SCRAPE_SECONDS)
        shown = _shown(name, file, found.get(name))
        # The same answer may be another user's, too.
        return answer({**shown, "waits": visible_waits(shown["waits"], user)} if "waits" in shown else shown)

    @app.get("/api/pipelines/{name}/tables/{table:path}")
    def one_table(name: str, table: str, user: User) -> JSONResponse:
        pipeline_of(name, user)
        found = known.gather(f"table {table}", [name], lambda watch: [watch.table(table)], _SCRAPE_SECONDS).get(name)
        if not isinstance(found, list):
            shown = found.to_json() if isinstance(found, HeadwaterError) else {"state": "gathering"}
            return answer({"pipeline": name, "table": table, **shown})
        if found[0] is None:
            raise HTTPException(404, f"pipeline {name} has no table {table}")
        return answer(found[0])

    @app.get("/metrics")
    def scrape(user: User) -> Response:
        names = [pipeline.name for pipeline in visible_pipelines(known.pipelines(), user)]
        found = known.gather("metrics", names, _samples, _SCRAPE_SECONDS)
        samples: list[metrics.Sample] = []
        for name in names:
            gathered = found.get(name)
            samples += gathered if isinstance(gathered, list) else metrics.unreadable(name)
        if may_see_faults(user):
            faulty = {Path(error.where).stem for error in known.faults()} - set(names)
            samples += [sample for name in sorted(faulty) for sample in metrics.unreadable(name)]
        return Response(metrics.exposition(samples), media_type=metrics.CONTENT_TYPE)

    @app.get("/static/{_version}/{file:path}")
    async def asset(file: str, request: Request) -> Response:
        response = await static.get_response(file, request.scope)
        # Whatever changes gets another address: a dozen small files are fetched once.
        response.headers["Cache-Control"] = "private, max-age=31536000, immutable"
        return response

    @app.get("/")
    @app.get("/pipelines/{_name}")
    @app.get("/pipelines/{_name}/tables/{_table:path}")
    def page(request: Request) -> HTMLResponse:
        """The same document for every page: its script reads the address."""
        root = str(request.scope.get("root_path", "")).rstrip("/")
        airflow = str(request.scope.get("app_root_path", "")).rstrip("/")
        filled = document
        for name, value in (("base", root), ("airflow", airflow), ("version", version)):
            filled = filled.replace(f"{{{{{name}}}}}", html.escape(value, quote=True))
        return HTMLResponse(filled)

    return app


def static_version() -> str:
    """Of the page's files, by their content: it stands in their addresses."""
    digest = hashlib.sha256()
    for file in sorted(_STATIC.rglob("*")):
        if file.is_file():
            digest.update(file.read_bytes())
    return digest.hexdigest()[:12]


def _shown(name: str, file: str, found: Any) -> dict[str, Any]:
    if isinstance(found, HeadwaterError):
        return {"pipeline": name, "file": file, "state": "unreadable", **found.to_json()}
    return found if found is not None else {"pipeline": name, "file": file, "state": "gathering"}


def _scrubbed(value: Any, scrubber: Scrubber) -> Any:
    """`value` with its free texts scrubbed. Names stay: a password may be an ordinary word, and the name of a table."""
    if isinstance(value, dict):
        return {
            key: scrubber.scrub(one) if key in _FREE_TEXTS and isinstance(one, str) else _scrubbed(one, scrubber)
            for key, one in value.items()
        }
    return [_scrubbed(one, scrubber) for one in value] if isinstance(value, list) else value


def _samples(watch: PipelineWatch) -> list[metrics.Sample]:
    watch.await_source(_SOURCE_SECONDS)
    return list(metrics.samples(watch.overview(), watch.table_rows()))


def _fault(error: HeadwaterError) -> dict[str, str]:
    return {"file": error.where, "message": error.message, "remedy": error.remedy}
