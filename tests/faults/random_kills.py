"""Kills of random processes at random moments of real training runs, with an oracle that does not know the verdict's code.

A series trains one drafter to its end through as many attempts as it takes. Each attempt is struck once: a victim is killed with
SIGKILL at a moment drawn from launch, imports, model, warm-up, training, checkpoint and stop. What the verdict must say follows from
which process was alive when it was struck, not from what the run's records say.
"""

import json
import os
import random
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import yaml

from draftsmith.checkpoint.save import find_latest
from draftsmith.runs import shim
from draftsmith.runs.launch import launch, look, look_closely, stop
from draftsmith.runs.transport import Host
from tests.conftest import small_tree, until

HERE = Host()
WITHIN_S = 10.0
MOMENTS = ("launch", "imports", "model", "compiling", "training", "saving", "stop")
# With how often each is struck; once an attempt has begun, its launcher and a reader of its log mean least.
VICTIMS = {"trainer": 6, "supervisor": 6, "supervisor and trainer": 4, "launcher": 1, "reader": 1}
STEPS, EVERY = 12, 3


@dataclass(frozen=True)
class Strike:
    """What happened in one attempt, for a person who reads a failure."""

    moment: str
    victim: str
    delay: float
    told: str


@dataclass
class Series:
    """One run with its strangers, struck again and again."""

    folder: Path
    config: Path
    rng: random.Random
    strikes: list[Strike] = field(default_factory=list)
    strangers: list[subprocess.Popen[bytes]] = field(default_factory=list)

    @property
    def run(self) -> str:
        return str(self.folder / "run")

    def begin(self) -> None:
        """Processes that look like ours and are not."""
        near = {**os.environ, shim.ATTEMPT: f"{self.run}-2/attempts/0001"}
        self.strangers = [
            subprocess.Popen(["sleep", "3600"], env=near),
            subprocess.Popen(["sh", "-c", f"sleep 3600; : {self.run}/attempts/0001"], start_new_session=True),
        ]

    def end(self) -> None:
        for stranger in self.strangers:
            shim.send(shim.descendants(stranger.pid).values(), signal.SIGKILL)
            stranger.kill()
            stranger.wait()

    # --- what the run's own folder says

    def attempts(self) -> list[Path]:
        return sorted(Path(self.run).glob("attempts/0*"))

    def phase(self) -> dict:
        return shim.read_json(str(self.attempts()[-1] / "phase.json")) if self.attempts() else {}

    def newest_whole(self) -> int:
        found, _ = find_latest(Path(self.run))
        return int(found.name.rpartition("-")[2]) if found else 0

    def record(self) -> dict:
        return look_closely(HERE, self.run)[1].get("record") or {}

    # --- one attempt

    def command(self) -> list[str]:
        argv = [sys.executable, "-m", "draftsmith", "train", "--config", str(self.config), f"run.dir={self.run}"]
        return [*argv, "--resume", "latest"]

    def strike(self, moments: tuple[str, ...]) -> None:
        """Start an attempt and strike it; raises AssertionError if anything is not as it must be."""
        moment = self.rng.choice(moments)
        delay = self.rng.uniform(0.0, {"launch": 0.6, "imports": 4.0, "stop": 1.0}.get(moment, 0.3))
        weights = {name: 0 if moment == "stop" and name in ("launcher", "reader") else often for name, often in VICTIMS.items()}
        victim = self.rng.choices(list(weights), list(weights.values()))[0]
        if moment == "launch" and self.rng.random() < 0.5:
            victim = "launcher"
        before, count = self.newest_whole(), len(self.attempts())
        client = self.start()
        ending = None
        try:
            if moment != "launch":
                self.reach(moment, before, count, client)
            if moment == "stop":
                ending = threading.Thread(target=self.quiet_stop)
                ending.start()
            time.sleep(delay)
            told = self.hit(victim, client, count, stopping=moment == "stop")
        finally:
            if ending is not None:
                ending.join()
            with suppress(subprocess.TimeoutExpired):
                client.wait(30)
            client.kill()
            client.wait()
        self.strikes.append(Strike(moment, victim, round(delay, 2), told))
        self.settle(before)

    def start(self) -> subprocess.Popen[bytes]:
        """The launching side is a process of its own, so that it can be killed."""
        code = (
            "import json, sys; from draftsmith.runs.launch import launch; from draftsmith.runs.transport import Host;"
            "launch(Host(), sys.argv[1], sys.argv[2:], until='start', wait_s=60, say=lambda line: None, grace_s=30, beat_s=0.2)"
        )
        words = [sys.executable, "-c", code, self.run, *self.command()]
        return subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE)

    def reach(self, moment: str, before: int, count: int, client: subprocess.Popen[bytes]) -> None:
        """Wait until the trainer itself has said that it is there; a run that is already past it is struck where it is."""
        wanted = self.rng.randint(before + 1, STEPS) if moment in ("training", "stop") else 0

        def there() -> bool:
            if len(self.attempts()) <= count:
                return False
            if (self.attempts()[-1] / "exit.json").exists() and shim.read_json(str(self.attempts()[-1] / "exit.json")):
                return True
            phase = self.phase()
            if moment in ("training", "stop"):
                return phase.get("name") in ("training", "saving") and (phase.get("step") or 0) >= wanted
            order = ("interpreter", "imports", "model", "compiling", "training", "saving")
            return phase.get("name") in order and order.index(phase["name"]) >= order.index(moment)

        deadline = time.monotonic() + 120
        while not there():
            if client.poll():
                assert client.stderr is not None
                raise AssertionError(f"the launch failed: {client.stderr.read().decode()[-600:]}")
            assert time.monotonic() < deadline, f"{moment} was never reached: {look(HERE, self.run)}"
            time.sleep(0.002)

    def quiet_stop(self) -> None:
        stop(HERE, self.run, wait_s=30, say=lambda _line: None)

    def hit(self, victim: str, client: subprocess.Popen[bytes], count: int, *, stopping: bool) -> str:
        """Kill, then ask for the verdict until it is what it must be; nothing else may be said of a dead run meanwhile."""
        if victim == "launcher":
            helpers = list(shim.descendants(client.pid).values())
            client.kill()
            client.wait()
            # What it had asked for may be under way, and begin the attempt after all.
            until(lambda: not any(map(self.is_starting, helpers)), "the launcher's helper to end", seconds=30)
            return self.after_launcher(count)
        if victim == "reader":
            words = [sys.executable, "-m", "draftsmith", "logs", "-f", self.run]
            reader = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            time.sleep(0.5)
            reader.kill()
            reader.wait()
            return "reader killed"
        until(lambda: len(self.attempts()) > count and self.record().get("child"), "the attempt's record", seconds=30)
        record = self.record()
        alive = {}
        for who in ("shim", "child") if victim != "trainer" else ("child",):
            if who == "shim" or victim != "supervisor":
                alive[who] = self.kill(record[who])
        names = {look(HERE, self.run).line()}
        expected = self.expected(alive, stopping)

        def seen() -> bool:
            names.add(look(HERE, self.run).line())
            return any(look(HERE, self.run).line().startswith(wanted) for wanted in expected)

        until(seen, f"one of {expected} after {victim} was killed; seen were {names}", seconds=WITHIN_S)
        for line in names:
            fine = any(line.startswith(wanted) for wanted in expected)
            # Until the supervisor has noticed, the last word stands.
            still = line.split(":")[0] in ("running", "silent", "compiling")
            orphan = "shim" in alive and line.startswith("supervisor killed")
            assert fine or still or orphan, f"'{line}' was said after {victim} was killed; expected {expected}"
        return next(iter(sorted(names)))

    def is_starting(self, process: dict) -> bool:
        return shim.is_same(process) and "\0start\0" in shim.read_text(f"/proc/{process['pid']}/cmdline")

    def kill(self, process: dict) -> bool:
        """Whether this process was there to be killed."""
        was = shim.is_same(process)
        shim.send([process], signal.SIGKILL)
        return was

    def expected(self, alive: dict[str, bool], stopping: bool) -> tuple[str, ...]:
        """Beginnings of the verdict's line that are right, given who was alive when it was struck."""
        done = ("exited: finished", "exited: stopped on request")
        if "shim" not in alive:
            killed = "exited: killed from outside (SIGKILL)"
            # A trainer that is a corpse when it is struck has ended by itself.
            return (killed, *done) if stopping or not alive["child"] else (killed,)
        if not alive["shim"]:
            return done
        return ("supervisor killed: ", *done) if stopping else ("supervisor killed: ",)

    def after_launcher(self, count: int) -> str:
        """Its end changes nothing: the attempt was begun or it was not, and if it was, it goes on."""
        time.sleep(1.0)
        line = look(HERE, self.run).line()
        if len(self.attempts()) == count:
            assert not shim.members(f"{self.run}/attempts/"), "no attempt, and yet processes"
            return "launcher killed before it began"
        assert shim.is_same(self.record().get("shim")) or line.startswith("exited: finished"), (
            f"the attempt died with its launcher: {line}"
        )
        return "launcher killed, the run goes on"

    def settle(self, before: int) -> None:
        """End what is left, and look whether anything was lost."""
        verdict = look(HERE, self.run)
        if verdict.alive:
            ended = stop(HERE, self.run, wait_s=30, say=lambda _line: None)
            assert not ended.alive
        # A trainer's own helpers end when its pipes close, and the supervisor right after its last word.
        until(lambda: not shim.members(f"{self.run}/attempts/"), "the end of everything the run has started", seconds=WITHIN_S)
        until(lambda: not self.supervisors(), "the supervisor's own end", seconds=WITHIN_S)
        log = (self.attempts()[-1] / "log").read_text() if self.attempts() else ""
        resumed = re.search(r"resuming at step (\d+)", log)
        assert resumed is None or int(resumed.group(1)) == before, f"resumed at {resumed}, though step {before} was saved"
        assert self.newest_whole() >= before, f"checkpoint {before} was lost"
        assert all(stranger.poll() is None for stranger in self.strangers), "a stranger was signalled"

    def supervisors(self) -> list[int]:
        return [pid for pid in shim.descendants(0) if f"supervise\0{self.run}\0" in shim.read_text(f"/proc/{pid}/cmdline")]

    def finish(self) -> str:
        """Train to the end undisturbed; the digest of the final weights."""
        launch(HERE, self.run, self.command(), until="start", wait_s=60, say=lambda _line: None, grace_s=30, beat_s=0.2)
        until(lambda: not look(HERE, self.run).alive, "the end", seconds=180)
        assert look(HERE, self.run).cause == "finished", look(HERE, self.run)
        return digest(Path(self.run))


def digest(run: Path) -> str:
    """Of the weights of the last step."""
    return json.loads((run / f"checkpoint-{STEPS}" / "trainer_state.json").read_text())["weights_sha256"]


def write_config(folder: Path, target: Path, chats: Path, *, compiled: bool) -> Path:
    """A run of seconds: twelve steps, a checkpoint every three."""
    tree = small_tree(target, chats, folder / "unused")
    tree["train"]["max_steps"] = STEPS
    tree["checkpoint"]["every"] = EVERY
    tree["compile"] = {"enabled": compiled, "cache": str(folder / "cache")}
    path = folder / f"config-{compiled}.yaml"
    path.write_text(yaml.safe_dump(tree))
    return path
