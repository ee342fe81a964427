"""A real sshd on loopback, and a fresh pid namespace behind it as the container: runs outlive every connection to them."""

import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import textwrap
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import yaml

from draftsmith.runs import shim
from draftsmith.runs.launch import launch, log_chunks, look, look_closely, stop
from draftsmith.runs.transport import Host, ask
from tests.conftest import until

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin:/sbin")
pytestmark = [
    pytest.mark.process,
    pytest.mark.skipif(SSHD is None or os.getuid() != 0, reason="needs root and Debian's openssh-server"),
]
TRAINER = """
    import pathlib, signal, sys, time
    from draftsmith.runs.reporter import RunReporter
    def save(*_):
        pathlib.Path("saved").write_text("saved")
        sys.exit(143)
    signal.signal(signal.SIGTERM, save)
    reporter = RunReporter.from_environment()
    reporter.phase("model")
    pathlib.Path("first-step").write_text(str(time.clock_gettime(time.CLOCK_BOOTTIME)))
    for step in range(1, 10**6):
        reporter.step(step, 10**6)
        print("step", step)
        time.sleep(0.05)
    """


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """An sshd with its own configuration, keys and port, and a client configuration that knows it as `box`."""
    folder = tmp_path_factory.mktemp("sshd")
    for name in ("host", "user"):
        subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(folder / name)], check=True)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    shutil.copy(folder / "user.pub", folder / "authorized")
    (folder / "sshd_config").write_text(
        f"Port {port}\nListenAddress 127.0.0.1\nHostKey {folder}/host\nAuthorizedKeysFile {folder}/authorized\n"
        f"PidFile {folder}/pid\nUsePAM no\nStrictModes no\nPermitRootLogin prohibit-password\n"
    )
    (folder / "config").write_text(
        f"Host box\n  HostName 127.0.0.1\n  Port {port}\n  User root\n  IdentityFile {folder}/user\n  IdentitiesOnly yes\n"
        f"  UserKnownHostsFile {folder}/known\n  StrictHostKeyChecking accept-new\n"
    )
    Path("/run/sshd").mkdir(exist_ok=True)
    process = subprocess.Popen([str(SSHD), "-D", "-e", "-f", str(folder / "sshd_config")], stderr=subprocess.DEVNULL)
    # OpenSSH looks for its configuration in the home of the password file, so the client is told where ours is.
    client = folder / "bin" / "ssh"
    client.parent.mkdir()
    client.write_text(f'#!/bin/sh\nexec {shutil.which("ssh")} -F {folder}/config "$@"\n')
    client.chmod(0o755)
    until(lambda: socket.socket().connect_ex(("127.0.0.1", port)) == 0, "sshd to listen")
    yield {"path": f"{client.parent}:{os.environ['PATH']}", "process": process}
    process.terminate()
    process.wait(10)


@pytest.fixture(scope="module")
def container() -> Iterator[int]:
    """A process that is pid 1 of a fresh pid namespace, with a /proc of its own."""
    outer = subprocess.Popen(["unshare", "--pid", "--fork", "--mount-proc", "--kill-child", "sleep", "3600"])

    def inner() -> int | None:
        below = [pid for pid, found in shim.descendants(outer.pid).items() if "sleep" in shim.read_text(f"/proc/{pid}/comm")]
        return below[0] if below else None

    yield until(inner, "the namespace")
    outer.kill()
    outer.wait()


@pytest.fixture(params=["ssh", "container over ssh"])
def host(request: pytest.FixtureRequest, server: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Host:
    monkeypatch.setenv("PATH", server["path"])
    monkeypatch.setenv("HOME", str(tmp_path))
    wrapper: tuple[str, ...] = ()
    if request.param != "ssh":
        wrapper = ("nsenter", "-t", str(request.getfixturevalue("container")), "--pid", "--mount", "--")
    return Host("box", ssh="box", wrapper=wrapper, python=sys.executable)


@pytest.fixture
def run(tmp_path: Path, host: Host) -> Iterator[str]:
    folder = str(tmp_path / "run")
    yield folder
    with suppress(Exception):
        stop(host, folder, wait_s=10, say=lambda _line: None)


def spec(tmp_path: Path) -> dict[str, Any]:
    source = str(Path(shim.__file__).parents[2])
    return {"cwd": str(tmp_path), "env": {"PYTHONPATH": source}, "beat_s": 0.2, "grace_s": 10}


def argv() -> list[str]:
    return [sys.executable, "-c", textwrap.dedent(TRAINER)]


def test_a_run_outlives_its_connections_and_stops_after_saving(host: Host, run: str, tmp_path: Path) -> None:
    verdict = launch(host, run, argv(), until="step", wait_s=60, say=lambda _line: None, **spec(tmp_path))
    assert verdict.name == "running"
    seen = look_closely(host, run)[1]
    if host.wrapper:
        assert seen["record"]["place"]["pid_ns"] != os.readlink("/proc/self/ns/pid")
        assert look(Host(), run).name == "container restarted", "asked from outside, its pids mean nothing"
    # A reader that is cut off in the middle takes nothing with it.
    follow = host.argv(["tail", "-f", f"{seen['attempt']}/log"])
    reader = subprocess.Popen(follow, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    assert select.select([reader.stdout], [], [], 30)[0], "nothing came through ssh"
    reader.kill()
    reader.wait()
    step = look_closely(host, run)[1]["phase"]["step"]
    until(lambda: look_closely(host, run)[1]["phase"]["step"] > step, "the run to go on")
    logged = b"".join(log_chunks(host, run, follow=False))
    assert logged.startswith(b"step 1\nstep 2\n")
    ended = stop(host, run, wait_s=20, say=lambda _line: None)
    assert ended.cause == "stopped on request (exit code 143)"
    assert (tmp_path / "saved").read_text() == "saved"
    assert look_closely(host, run)[1]["exit"]["unkillable"] == []


def test_launch_returns_soon_after_the_phase_and_holds_no_stream(
    host: Host, run: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Report 23, over ssh: through captured pipes, which end only when everybody has closed them."""
    hosts = tmp_path / ".config" / "draftsmith" / "hosts.yaml"
    hosts.parent.mkdir(parents=True)
    hosts.write_text(
        yaml.safe_dump({"box": {"ssh": "box", "wrapper": list(host.wrapper), "python": host.python, "folder": str(tmp_path)}})
    )
    # What `-m draftsmith` is on that host: a package whose only command is the trainer of these tests.
    (tmp_path / "draftsmith").mkdir()
    (tmp_path / "draftsmith" / "__main__.py").write_text(
        f"import sys; sys.path[0] = {str(Path(shim.__file__).parents[2])!r}; del sys.modules['draftsmith']\n"
        + textwrap.dedent(TRAINER)
    )
    (tmp_path / "draftsmith" / "__init__.py").touch()
    command = [sys.executable, "-m", "draftsmith", "launch", "--run", "box:run", "--until", "step", "--", "train"]
    source = {**os.environ, "PYTHONPATH": str(Path(shim.__file__).parents[2])}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=source)
    returned = shim.clock()
    assert done.returncode == 0, done.stderr
    first_step = float((tmp_path / "first-step").read_text())
    # The bound is a promise of the tool, not a measurement of this machine.
    assert returned - first_step < 5
    assert look(host, run).name == "running"


def test_a_log_is_followed_across_a_cut(host: Host, run: str, tmp_path: Path, server: dict[str, Any]) -> None:
    ask(host, ["start"], {"run": run, "argv": argv(), **spec(tmp_path)})
    pieces = log_chunks(host, run, follow=True)
    read = b""
    while b"step 5\n" not in read:
        read += next(pieces)
    for pid in shim.descendants(server["process"].pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    last = read.count(b"\n")
    while read.count(b"\n") < last + 20:
        read += next(pieces)
    lines = read.decode().splitlines()
    assert lines[:20] == [f"step {n}" for n in range(1, 21)], "nothing twice, nothing lost"


def test_the_shared_connection_is_ours_alone_and_may_die(host: Host, run: str, tmp_path: Path) -> None:
    assert look(host, run).name == "never launched"
    folder = Path(tempfile.gettempdir()) / f"draftsmith-ssh-{os.getuid()}"
    assert folder.stat().st_mode & 0o777 == 0o700
    masters = [pid for pid in shim.descendants(0) if f"{folder}/" in shim.read_text(f"/proc/{pid}/cmdline")]
    assert masters, "one connection serves many questions"
    for pid in masters:
        os.kill(pid, signal.SIGKILL)
    assert look(host, run).name == "never launched", "its death costs a new connection and nothing else"


def test_a_run_outlives_the_client_and_the_whole_server(host: Host, run: str, tmp_path: Path, server: dict[str, Any]) -> None:
    ask(host, ["start"], {"run": run, "argv": argv(), **spec(tmp_path)})
    until(lambda: look(host, run).name == "running", "the run to train")
    # Every process of this connection's session on the server's side, as a cut cable leaves them.
    for pid in shim.descendants(server["process"].pid):
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    assert look(host, run).name == "running", "a new connection tells the truth"


@pytest.mark.skipif(shutil.which("tmux") is None, reason="needs tmux")
def test_a_run_outlives_the_terminal_and_tmux(host: Host, run: str, tmp_path: Path) -> None:
    code = (
        "import json, sys; from draftsmith.runs.transport import Host, ask;"
        f"ask(Host('box', 'box', {host.wrapper!r}, sys.executable), ['start'], json.load(open({str(tmp_path / 'spec')!r})))"
    )
    (tmp_path / "spec").write_text(json.dumps({"run": run, "argv": argv(), **spec(tmp_path)}))
    (tmp_path / "start.py").write_text(code)
    tmux = ["tmux", "-L", f"draftsmith-test-{os.getpid()}"]
    environment = {**os.environ, "PYTHONPATH": str(Path(shim.__file__).parents[2])}
    subprocess.run(
        [*tmux, "new-session", "-d", f"{sys.executable} {tmp_path}/start.py; sleep 600"], check=True, env=environment
    )
    until(lambda: look(host, run).name == "running", "the run to train")
    subprocess.run([*tmux, "kill-server"], check=True)
    step = look_closely(host, run)[1]["phase"]["step"]
    until(lambda: look_closely(host, run)[1]["phase"]["step"] > step, "the run to go on without tmux")
