"""A page of the runs below one folder: verdicts, figures and live curves. Read-only, for this machine alone."""

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from flask import Flask, Response, abort, render_template, request
from werkzeug.serving import WSGIRequestHandler, make_server

from draftsmith.errors import UsageError
from draftsmith.runs.curves import BOTTOM, CURVES, HEIGHT, LEFT, TOP, WIDTH, Metrics, drawing
from draftsmith.runs.launch import find_runs, look_closely
from draftsmith.runs.show import colour, figures, shown
from draftsmith.runs.transport import Host
from draftsmith.runs.verdict import Verdict

LOOPBACK = "127.0.0.1"
# Nothing but what we serve may load, and no other page may show ours.
POLICY = "default-src 'none'; style-src 'self'; script-src 'self'; connect-src 'self'; img-src 'self'; frame-ancestors 'none'; base-uri 'none'"


class Board:
    """What the pages show. Only runs that a look into the folder found can be named; no request becomes a path."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._metrics: dict[Path, Metrics] = {}

    def runs(self) -> dict[str, Path]:
        """Every launched run by its path below the folder; the folder itself is called by its own name."""
        found = {str(path.relative_to(self.folder)): path for path in find_runs(self.folder)}
        return {self.folder.name if name == "." else name: path for name, path in found.items()}

    def _points(self, run: Path) -> Mapping[str, Any]:
        # The folder of a training run, or of a job, as the demo is, that trains in a folder of its own.
        files = [path for path in (run / "metrics.jsonl", *sorted(run.glob("*/metrics.jsonl"))) if path.is_file()]
        if not files:
            return {}
        newest = max(files, key=lambda path: path.stat().st_mtime)
        return self._metrics.setdefault(newest, Metrics(newest)).read()

    def card(self, name: str, run: Path) -> dict[str, Any]:
        """One run's line in the list."""
        verdict, seen = look_closely(Host(), str(run))
        points = self._points(run)
        return {
            "name": shown(name),
            "link": "/run/" + quote(os.fsencode(name)),
            "verdict": verdict,
            "colour": colour(verdict),
            "figures": figures(seen),
            "share": _share(seen, verdict),
            "loss": drawing(points["loss"]) if points.get("loss") else None,
            "seen": seen,
            "curves": [(title, drawing(points[curve])) for curve, title in CURVES.items() if points.get(curve)],
        }


def _share(seen: Mapping[str, Any], verdict: Verdict) -> int | None:
    """Percent of the steps that are done."""
    step, steps = (seen.get("phase") or {}).get("step"), (seen.get("phase") or {}).get("steps")
    if isinstance(step, int) and isinstance(steps, int) and steps > 0:
        return min(100, 100 * step // steps)
    return 100 if verdict.code == 0 else None


def make_app(folder: Path) -> Flask:
    """The application. GET only; requests that name another host than the loopback are refused, so that no foreign page can ask."""
    board = Board(folder.resolve())
    app = Flask(__name__, template_folder="pages", static_folder="pages/static")
    app.config["TRUSTED_HOSTS"] = [LOOPBACK, "localhost"]
    sizes = {"width": WIDTH, "height": HEIGHT, "left": LEFT, "bottom": BOTTOM, "top": TOP}
    app.jinja_env.globals["size"] = sizes
    app.jinja_env.finalize = lambda value: shown(value) if type(value) is str else value

    @app.get("/")
    def index() -> str:
        cards = [board.card(name, path) for name, path in board.runs().items()]
        return render_template("index.html", folder=str(board.folder), cards=cards, part="part" in request.args)

    @app.get("/run/<path:name>")
    def run(name: str) -> str:
        path = board.runs().get(os.fsdecode(name.encode("utf-8", "surrogateescape")))
        if path is None:
            abort(404)
        return render_template("run.html", card=board.card(name, path), part="part" in request.args)

    @app.after_request
    def guard(response: Response) -> Response:
        response.headers["Content-Security-Policy"] = POLICY
        response.headers["X-Content-Type-Options"] = "nosniff"
        response.headers["Referrer-Policy"] = "no-referrer"
        if response.mimetype == "text/html":
            response.headers["Cache-Control"] = "no-store"
        return response

    return app


class _Quiet(WSGIRequestHandler):
    def log_request(self, code: int | str = "-", size: int | str = "-") -> None:
        """A page that asks every two seconds needs no log."""


def serve(folder: Path, port: int, ready: Callable[[str], None]) -> None:
    """Serve until interrupted. Binds to the loopback alone; `ready(url)` once it listens. Raises UsageError for a port that is taken."""
    if not folder.is_dir():
        raise UsageError(f"folder '{folder}' does not exist; give the one that holds your runs")
    try:
        # Answers several at once, since browsers open connections that they do not use.
        server = make_server(LOOPBACK, port, make_app(folder), threaded=True, request_handler=_Quiet)
    except (OSError, SystemExit) as error:
        raise UsageError(f"port {port} cannot be used; choose another with --port, or 0 for any") from error
    ready(f"http://{LOOPBACK}:{server.server_port}/")
    try:
        server.serve_forever()
    finally:
        server.server_close()
