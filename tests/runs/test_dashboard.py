"""The page of runs: what it shows is true, it shows nothing else, and it goes on by itself in a real browser."""

import asyncio
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import aiohttp
import pytest
from flask.testing import FlaskClient

from draftsmith.errors import UsageError
from draftsmith.runs.curves import Metrics, drawing, thin, ticks
from draftsmith.runs.dashboard import make_app, serve
from draftsmith.runs.launch import look
from draftsmith.runs.transport import Host, ask
from tests.conftest import end_all, until

HERE = Host()
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
NASTY = "a <script>alert(1)</script> & 'b' #1?"


@pytest.fixture
def runs(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "runs"
    folder.mkdir()
    yield folder
    for run in folder.iterdir():
        end_all(run)


def start(run: Path, code: str) -> None:
    ask(HERE, ["start"], {"run": str(run), "argv": [sys.executable, "-c", code], "beat_s": 0.2})


def finish(run: Path, code: str) -> None:
    start(run, code)
    until(lambda: look(HERE, str(run)).name == "exited", "the end")


def write_steps(run: Path, first: int, last: int) -> None:
    rows = [{"kind": "step", "step": step, "loss": 10.0 / step, "tokens_per_s": 100} for step in range(first, last + 1)]
    with (run / "metrics.jsonl").open("a") as file:
        file.write("".join(json.dumps(row) + "\n" for row in rows))


def client_of(folder: Path) -> FlaskClient:
    return make_app(folder).test_client()


@pytest.mark.process
def test_the_list_and_the_page_of_a_run_tell_verdict_and_curves(runs: Path) -> None:
    finish(runs / "good", "print('done')")
    finish(runs / "bad", "raise ValueError('width 3, expected 4')")
    (runs / "not-a-run").mkdir()
    write_steps(runs / "good", 1, 50)
    page = client_of(runs)
    listed = page.get("/").text
    for words in ('<a href="/run/good">', "exited", "finished", "exception (exit code 1): ValueError: width 3, expected 4"):
        assert words in listed
    assert "not-a-run" not in listed
    shown = page.get("/run/bad").text
    assert "see the traceback in the log" in shown
    assert "Traceback (most recent call last)" in shown
    assert "loss, now 0.2" in page.get("/run/good").text
    assert page.get("/?part").text.lstrip().startswith("<h1>Runs</h1>"), "the part that is put in place holds no frame"


@pytest.mark.process
def test_names_and_logs_are_text_and_secrets_are_not_shown(runs: Path) -> None:
    run = runs / NASTY.replace("/", "|")
    finish(run, "print('<script>alert(2)</script> token=abcdef'); raise SystemExit(1)")
    page = client_of(runs)
    listed = page.get("/").text
    link = listed.split('<a href="')[1].split('"')[0]
    shown = page.get(link)
    assert shown.status_code == 200
    for text in (listed, shown.text):
        assert "<script>alert" not in text
    assert "&lt;script&gt;alert(2)" in shown.text
    assert "abcdef" not in shown.text


def test_it_only_reads_only_runs_and_only_for_this_machine(runs: Path, tmp_path: Path) -> None:
    (tmp_path / "attempts" / "0001").mkdir(parents=True)
    (tmp_path / "secret").write_text("secret")
    page = client_of(runs)
    for path in (
        "/run/..",
        "/run/../secret",
        "/run/%2e%2e/secret",
        "/run//etc/passwd",
        "/run/%2fetc%2fpasswd",
        "/run/x",
        "/static/../dashboard.py",
    ):
        answer = page.get(path)
        assert answer.status_code in (308, 404), path
        assert "root:" not in answer.text
    for verb in ("post", "put", "delete", "patch"):
        assert getattr(page, verb)("/").status_code == 405
    assert page.get("/", headers={"Host": "evil.example"}).status_code == 400, "a foreign page cannot ask through its own name"
    answer = page.get("/", headers={"Host": "localhost:8123"})
    assert answer.status_code == 200
    assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
    assert answer.headers["Cache-Control"] == "no-store"


def test_a_folder_or_port_that_will_not_do(tmp_path: Path) -> None:
    import socket

    with pytest.raises(UsageError, match="does not exist; give the one that holds your runs"):
        serve(tmp_path / "none", 0, print)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(UsageError, match=rf"port {port} cannot be used; choose another with --port"):
            serve(tmp_path, port, print)


def test_metrics_are_read_as_they_grow(tmp_path: Path) -> None:
    file = tmp_path / "metrics.jsonl"
    metrics = Metrics(file)
    assert metrics.read() == {}
    file.write_text('{"step": 1, "loss": 2.0}\n{"step": 2, "lo')
    assert metrics.read() == {"loss": [(1.0, 2.0)]}
    with file.open("a") as more:
        more.write('ss": 1.5}\nnot json\n{"loss": 1}\n[]\n{"step": 3, "loss": NaN, "tau": 2.5}\n')
    assert metrics.read() == {"loss": [(1.0, 2.0), (2.0, 1.5)], "tau": [(3.0, 2.5)]}
    file.with_name("new").write_text('{"step": 1, "loss": 9.0}\n')
    file.with_name("new").replace(file)
    assert metrics.read() == {"loss": [(1.0, 9.0)]}, "a resumed run rewrites what it goes on from"


@pytest.mark.parametrize("count", [1, 2, 299, 300, 301, 1000, 12345])
def test_thinning_keeps_means_and_the_last_point(count: int) -> None:
    points = [(float(i), 3.0 * i + 1) for i in range(count)]
    shown = thin(points)
    assert len(shown) <= 300
    assert shown[-1] == points[-1]
    assert all(abs(y - (3 * x + 1)) < 1e-6 for x, y in shown), "a straight line stays one"


@pytest.mark.parametrize(("low", "high"), [(0.0, 1.0), (0.013, 0.0131), (1.0, 3000.0), (-5.0, 5.0), (2.0, 2.0), (1e-7, 3e7)])
def test_ticks_are_few_round_and_inside(low: float, high: float) -> None:
    found = ticks(low, high)
    assert 1 <= len(found) <= 6
    spare = 1e-6 * (high - low)
    assert all(low - spare <= tick <= high + spare for tick in found)


def test_a_flat_curve_and_a_single_point_can_be_drawn() -> None:
    for points in ([(1.0, 2.0)], [(1.0, 0.0), (2.0, 0.0)]):
        drawn = drawing(points)
        assert drawn["path"].startswith("M")
        assert "nan" not in str(drawn)


async def in_browser(url: str, port: int, questions: list[tuple[str, str]], act: dict[int, object]) -> None:
    """Open `url` in the browser that listens at `port`; wait until each script answers as expected, acting before some of them."""
    async with aiohttp.ClientSession() as session:
        async with session.put(f"http://127.0.0.1:{port}/json/new?{url}") as answer:
            page = await answer.json()
        async with session.ws_connect(page["webSocketDebuggerUrl"]) as socket:
            number = 0
            for index, (script, expected) in enumerate(questions):
                if index in act:
                    act[index]()  # type: ignore[operator]
                for _ in range(150):
                    number += 1
                    told = {"expression": script, "returnByValue": True}
                    await socket.send_json({"id": number, "method": "Runtime.evaluate", "params": told})
                    found = None
                    while found is None or found.get("id") != number:
                        found = await socket.receive_json()
                    value = found["result"]["result"].get("value")
                    if value == expected:
                        break
                    await asyncio.sleep(0.1)
                assert value == expected, script


@pytest.mark.process
@pytest.mark.skipif(CHROMIUM is None, reason="needs chromium")
def test_a_real_browser_shows_a_run_going_on_and_ending(runs: Path) -> None:
    run = runs / "live one"
    start(run, "import time; print('up', flush=True); time.sleep(600)")
    until(lambda: "up" in (run / "attempts/0001/log").read_text() and look(HERE, str(run)).name == "running", "the run")
    write_steps(run, 1, 10)
    command = [sys.executable, "-m", "draftsmith", "dashboard", str(runs), "--port", "0"]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    profile = tempfile.mkdtemp()
    words = [
        str(CHROMIUM),
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--remote-debugging-port=0",
        f"--user-data-dir={profile}",
    ]
    browser = subprocess.Popen([*words, "about:blank"], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        assert server.stdout is not None
        url = server.stdout.readline().split()[0]
        assert url.startswith("http://127.0.0.1:")
        port_file = Path(profile) / "DevToolsActivePort"
        until(lambda: port_file.exists() and port_file.read_text().strip(), "the browser", seconds=60)
        port = int(port_file.read_text().split()[0])
        pill = "document.querySelector('.pill').textContent"
        caption = "document.querySelector('figcaption b').textContent"
        state = "document.getElementById('state').className"
        asyncio.run(
            in_browser(
                f"{url}run/live%20one",
                port,
                [(pill, "running"), (caption, "1"), (caption, "0.5"), (pill, "exited"), (state, ""), (state, "lost")],
                {2: lambda: write_steps(run, 11, 20), 3: lambda: end_trainer(run), 5: server.terminate},
            )
        )
    finally:
        for process in (server, browser):
            process.kill()
            process.wait()
        shutil.rmtree(profile, ignore_errors=True)


def end_trainer(run: Path) -> None:
    ask(HERE, ["stop", str(run)])
