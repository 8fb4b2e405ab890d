"""The page's server: one HTML file, plotly's script from its Python package, and the charts as JSON. Nothing leaves
the host, and nothing is written."""

import asyncio
import gzip
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import cache
from pathlib import Path

import numpy as np
from plotly.io.json import to_json_plotly
from pyarrow import ArrowException
from starlette.applications import Starlette
from starlette.middleware import Middleware
from starlette.middleware.base import BaseHTTPMiddleware, RequestResponseEndpoint
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.responses import HTMLResponse, JSONResponse, PlainTextResponse, Response
from starlette.routing import Route

from olmorl.dashboard.charts import CHARTS
from olmorl.dashboard.plotly_script import page_script
from olmorl.dashboard.run_data import RolloutsOf, RunData
from olmorl.dashboard.samples import read_group, step_groups

_PAGE = Path(__file__).with_name("page.html")
_SCRIPT = Path(__file__).with_name("page.js")
_HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; img-src 'self' data: blob:; "
        "connect-src 'self'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Cache-Control": "no-store",
}


def dashboard_app(directories: list[Path]) -> Starlette:
    """`directories`: the run shown first; more are laid over its curves.

    Raises:
        ConfigError: one of them is no run directory.
    """
    runs = [RunData(path) for path in directories]
    _tell_apart(runs)
    lock = asyncio.Lock()  # one request reads the files at a time
    drawn: tuple[object, str] = (None, "")

    async def newest() -> str:
        nonlocal drawn
        async with lock:
            state = [run.state for run in runs]
            if state != drawn[0]:
                drawn = state, await asyncio.to_thread(_charts, runs)
            return drawn[1]

    async def charts(request: Request) -> Response:
        return Response(await newest(), media_type="application/json")

    @asynccontextmanager
    async def made_ready(app: Starlette) -> AsyncIterator[None]:
        """While somebody types the address."""
        work = asyncio.gather(newest(), asyncio.to_thread(_packed_script))
        yield
        await work

    async def rollouts(request: Request) -> Response:
        try:
            step = int(request.query_params["step"])
        except (KeyError, ValueError):
            return PlainTextResponse("step must be a number, as in /rollouts?step=3", status_code=400)
        of: RolloutsOf = "evals" if request.query_params.get("of") == "evals" else "rollouts"
        if step not in runs[0].rollout_steps(of):
            return PlainTextResponse(f"no {of} of step {step} here", status_code=404)
        prompt = request.query_params.get("prompt")
        try:
            if prompt is None:
                return JSONResponse(await asyncio.to_thread(step_groups, runs[0], step, of))
            return JSONResponse(await asyncio.to_thread(read_group, runs[0], step, prompt, of))
        except LookupError as error:
            return PlainTextResponse(str(error.args[0]), status_code=404)
        except (OSError, ArrowException) as error:
            return PlainTextResponse(f"the rollouts of step {step} cannot be read: {error}", status_code=500)

    return Starlette(
        routes=[
            Route("/", lambda _: HTMLResponse(_PAGE.read_text())),
            Route("/page.js", lambda _: Response(_SCRIPT.read_text(), media_type="text/javascript")),
            Route("/plotly.js", _plotly),
            Route("/charts", charts),
            Route("/rollouts", rollouts),
        ],
        lifespan=made_ready,
        middleware=[Middleware(BaseHTTPMiddleware, dispatch=_add_headers), Middleware(GZipMiddleware, compresslevel=1)],
    )


def _plotly(request: Request) -> Response:
    kept = {"Cache-Control": "max-age=86400", "Vary": "Accept-Encoding"}
    if "gzip" not in request.headers.get("accept-encoding", ""):
        return Response(page_script(), media_type="text/javascript", headers=kept)
    return Response(_packed_script(), media_type="text/javascript", headers=kept | {"Content-Encoding": "gzip"})


@cache
def _packed_script() -> bytes:
    return gzip.compress(page_script().encode(), compresslevel=6)


async def _add_headers(request: Request, call_next: RequestResponseEndpoint) -> Response:
    response = await call_next(request)
    for name, value in _HEADERS.items():
        response.headers.setdefault(name, value)
    return response


def _tell_apart(runs: list[RunData]) -> None:
    """Runs whose directories have the same name get as much of their path as tells them apart."""
    paths = [run.directory.resolve() for run in runs]
    for depth in range(1, max(len(path.parts) for path in paths) + 1):
        names = ["/".join(path.parts[-depth:]) for path in paths]
        if len(set(names)) == len(set(paths)):
            break
    for run, name in zip(runs, names, strict=True):
        run.name = name


def _charts(runs: list[RunData]) -> str:
    for run in runs:
        run.refresh()
    charts = []
    for chart in CHARTS:
        figure = chart.make(runs)
        shown = {"data": figure.data, "layout": figure.layout}
        charts.append({"id": chart.id, "title": chart.title, "says": chart.says, "figure": shown})
    return str(
        to_json_plotly(
            {
                "runs": [
                    {"name": run.name, "status": run.status, "step": run.last_step, "unreadable": run.unreadable}
                    for run in runs
                ],
                "tiles": _tiles(runs[0]),
                "steps": {"rollouts": runs[0].rollout_steps(), "evals": runs[0].rollout_steps("evals")},
                "charts": charts,
            }
        )
    )


def _tiles(run: RunData) -> list[dict[str, str]]:
    """The glance: name and value of what an operator asks first."""
    tiles = []
    for name, metric, form in (
        ("reward", "reward/mean", "{:.3f}"),
        ("tokens/s", "throughput/tokens_per_second", "{:,.0f}"),
        ("trained tokens/s", "throughput/trained_tokens_per_second", "{:,.0f}"),
        ("MBU", "throughput/inference_mbu", "{:.1%}"),
        ("MFU", "throughput/inference_mfu", "{:.1%}"),
        ("learner MFU", "throughput/learner_mfu", "{:.1%}"),
        ("engine stall", "sync/stall_seconds", "{:.4f} s"),
        ("version lag", "off_policy/version_lag_mean", "{:.1f}"),
    ):
        value = run.last(metric)
        tiles.append({"name": name, "value": "–" if value is None else form.format(value)})
    steps, waits = run.series("time/wait_for_batch")
    _, seconds = run.series("time/step")
    if steps and sum(seconds):
        share = float(np.sum(waits) / np.sum(seconds))
        tiles.insert(6, {"name": "learner waits", "value": f"{share:.0%}"})
    return tiles
