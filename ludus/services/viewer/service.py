"""The viewer's service: the page, and the data that it shows, as JSON. Every route reads only.

GET /                                      the page
GET /api/runs                              runs, newest first
GET /api/run?run=ID                        one run: its stages, tools, configuration
GET /api/curves?run=ID&run=ID2&stage=rl    metrics of steps, thinned
GET /api/steps?run=ID                      steps, newest first
GET /api/step?run=ID&stage=rl&step=3       one step: its groups, and why it had no gradient
GET /api/rollouts?run=ID&sort=reward       rollouts: filtered, sorted, in pages
GET /api/rollout?run=ID&id=ROLLOUT         one rollout with its tokens
GET /api/ab-rollouts                       logs of A/B roll-outs, newest first
GET /api/ab-rollout?log=PATH               one A/B roll-out: state, course, decisions
GET /api/events?run=ID or ?log=PATH        server-sent events
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

from fastapi import FastAPI, Query, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse
from starlette.middleware import Middleware

from ludus.core.errors import ConfigError, LudusError, printable
from ludus.core.types import Status
from ludus.services.server.app import ERRORS, OPEN_PATHS, ServiceError, Settings, create_app
from ludus.services.server.peers import Peers
from ludus.services.server.serve import ServeOptions, serve
from ludus.services.viewer import rollout as view
from ludus.services.viewer.ab_rollouts import UnknownLog
from ludus.services.viewer.curves import ELAPSED, EPISODES
from ludus.services.viewer.events import MAX_STREAMS, Events
from ludus.services.viewer.overview import curves_of, describe_run, list_runs
from ludus.services.viewer.prepared import Data, prepare
from ludus.services.viewer.shell import Shell, add_page, page_files
from ludus.services.viewer.source import NoRuns
from ludus.services.viewer.steps import describe_step, list_steps
from ludus.store.search import MAX_ROWS, Search, Sort, search
from ludus.store.store import UnknownName

MAX_CHARS = 2000
Run = Annotated[str, Query(max_length=MAX_CHARS, description="A run's id.")]
Stage = Annotated[
    str | None,
    Query(
        max_length=MAX_CHARS, description="A stage; default: all, of curves the last that trains."
    ),
]
Number = Annotated[int, Query(ge=0, lt=2**62)]
MaybeNumber = Annotated[int | None, Query(ge=0, lt=2**62)]
Text = Annotated[str | None, Query(max_length=MAX_CHARS)]
Real = Annotated[float | None, Query(allow_inf_nan=False)]
Names = Annotated[list[str], Query(max_length=64)]


def viewer_service(settings: Settings, data: Data, *, peers: Peers | None = None) -> FastAPI:
    """An application that shows the runs of a folder, or of a store."""
    files = page_files()
    source, curves, tokenizers = data.source, data.curves, data.tokenizers
    events = Events(source, data.logs)

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            events.stop()
            source.close()
            if peers is not None:
                await peers.close()

    def health() -> Mapping[str, Any]:
        return {"streams": events.num_streams}

    app = create_app(
        "viewer",
        replace(settings, open_paths=(*OPEN_PATHS, *files)),
        health=health,
        lifespan=lifespan,
        middleware=[Middleware(Shell, tokens=settings.tokens)],
        docs_url=None,
    )
    app.state.on_stop = events.stop
    app.add_exception_handler(LudusError, _on_error)
    add_page(app, files)

    @app.get("/api/runs", responses=ERRORS, tags=["viewer"])
    def read_runs(before: MaybeNumber = None) -> Response:
        """Runs, newest first, and what to do about those that are not in the store."""
        return _json(list_runs(source, before))

    @app.get("/api/run", responses=ERRORS, tags=["viewer"])
    def read_run(run: Run) -> Response:
        """One run."""
        return _json(describe_run(source, run))

    @app.get("/api/curves", responses=ERRORS, tags=["viewer"])
    def read_curves(
        run: Names,
        stage: Stage = None,
        name: Annotated[list[str] | None, Query(max_length=64)] = None,
        x: Literal["step", "time", "episodes"] = "step",
        points: Annotated[int, Query(ge=2, le=2000)] = 240,
    ) -> Response:
        """Curves of metrics of several runs: points are [x, mean, least, greatest]."""
        axis = {"step": "step", "time": ELAPSED, "episodes": EPISODES}[x]
        return _json(curves_of(source, curves, run, stage, name, axis, points))

    @app.get("/api/steps", responses=ERRORS, tags=["viewer"])
    def read_steps(run: Run, stage: Stage = None, before: MaybeNumber = None) -> Response:
        """Steps, newest first."""
        return _json(list_steps(source.store(), run, stage, before))

    @app.get("/api/step", responses=ERRORS, tags=["viewer"])
    def read_step(
        run: Run, stage: Annotated[str, Query(max_length=MAX_CHARS)], step: Number
    ) -> Response:
        """One step with its groups, and why it had no gradient."""
        return _json(describe_step(source.store(), run, stage, step))

    @app.get("/api/rollouts", responses=ERRORS, tags=["viewer"])
    def read_rollouts(
        run: Run,
        sort: Sort = "time",
        order: Literal["desc", "asc"] = "desc",
        stage: Stage = None,
        step: MaybeNumber = None,
        group: Text = None,
        status: Status | None = None,
        tool: Text = None,
        min_reward: Real = None,
        max_reward: Real = None,
        dropped: bool | None = None,
        text: Annotated[str, Query(max_length=MAX_CHARS)] = "",
        after: Text = None,
        limit: Annotated[int, Query(ge=1, le=MAX_ROWS)] = 50,
    ) -> Response:
        """A page of rollouts; `after` is the `next` of the page before.

        A page may hold fewer rows than `limit`, or none, before the last one: a search that meets
        few rollouts is answered in parts.
        """
        ask = Search(
            sort, order == "desc", stage, step, group, status, tool, min_reward, max_reward,
            dropped, text, limit, after,
        )  # fmt: skip
        page = search(source.store(), run, ask)
        rows = [view.row_of(*one) for one in zip(page.rows, page.tools, strict=True)]
        return _json({"rows": rows, "next": page.next, "examined": page.num_examined})

    @app.get("/api/rollout", responses=ERRORS, tags=["viewer"])
    def read_rollout(
        run: Run,
        id: Annotated[str, Query(max_length=MAX_CHARS)],
        segment: Number = 0,
        offset: Number = 0,
    ) -> Response:
        """One rollout; with `segment` or `offset`, only its tokens from there on."""
        opened = source.store()
        decode = tokenizers.of(source.folder(run))
        if not (segment or offset):
            return _json(view.describe(opened, run, id, decode))
        start = view.Cursor(segment, offset)
        return _json(view.part(opened.trajectory(run, id), start, decode))

    @app.get("/api/ab-rollouts", responses=ERRORS, tags=["viewer"])
    def read_ab_rollouts() -> Response:
        """Logs of A/B roll-outs, newest first."""
        return _json(data.logs.list())

    @app.get("/api/ab-rollout", responses=ERRORS, tags=["viewer"])
    def read_ab_rollout(log: Annotated[str, Query(max_length=MAX_CHARS)]) -> Response:
        """One A/B roll-out, as far as its log has been read: ask again while `more` is true."""
        return _json(data.logs.describe(log))

    @app.get("/api/events", include_in_schema=False)
    async def read_events(request: Request, run: Text = None, log: Text = None) -> Response:
        """Server-sent events; see `events`."""
        if events.num_streams >= MAX_STREAMS:
            raise ServiceError(429, "busy", f"{MAX_STREAMS} pages follow already: close some")
        return StreamingResponse(events.stream(run, log), media_type="text/event-stream")

    return app


def _json(value: Any) -> Response:
    """Strict JSON in ASCII: lone surrogates stay what they are."""
    return JSONResponse(value) if not isinstance(value, bytes) else Response(value)


async def _on_error(request: Request, error: Exception) -> Response:
    """An error of the store, with its message: it says what would be right."""
    message = printable(str(error))
    if isinstance(error, NoRuns):
        refused = ServiceError(404, "no_runs", message)
    elif isinstance(error, UnknownName | UnknownLog):
        refused = ServiceError(404, "unknown_name", message)
    elif isinstance(error, ConfigError):
        refused = ServiceError(422, "invalid", message)
    else:
        refused = ServiceError(503, "store", message)
    return JSONResponse(refused.body, refused.status)


def serve_viewer(
    options: ServeOptions,
    runs_dir: Path,
    store: str | None,
    say: Callable[[str], object],
    logs: Sequence[Path] = (),
) -> None:
    """`ludus view`: serve until stopped. `logs`: of A/B roll-outs, beside those in `runs_dir`.

    Errors: ConfigError, StoreError for a store that cannot be read; one that is not there yet is
    waited for.
    """
    data = Data.open(runs_dir, store, logs)
    told = prepare(data)

    def ready(address: str) -> None:
        link = f"{address}/#token={options.tokens[0]}" if options.tokens else address
        say(f"runs of {store or runs_dir}: {link}")
        if told:
            say(told)

    serve(partial(viewer_service, data=data), options, ready)
