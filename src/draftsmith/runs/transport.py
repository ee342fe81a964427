"""How the shim is reached: on this machine, through the system's ssh, and through any wrapper command inside either.

No text of ours is ever parsed by a remote shell but one constant line: what to do, with which paths, travels as JSON on standard
input. A wrapper's exit code and silence prove nothing; only the shim's own line is an answer.
"""

import json
import shlex
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftsmith.errors import RunError
from draftsmith.runs import shim

CONNECT_S = 15
# Keep-alive finds a dead connection within 15 s; BatchMode never waits for a password that nobody will type.
SSH = (
    "ssh",
    "-o",
    "BatchMode=yes",
    "-o",
    f"ConnectTimeout={CONNECT_S}",
    "-o",
    "ServerAliveInterval=5",
    "-o",
    "ServerAliveCountMax=3",
)
# Takes {"source", "words", "spec"} from standard input, keeps the source as a file, runs it.
BOOT = """
import hashlib, json, os, subprocess, sys
try:
    told = json.loads(sys.stdin.read())
except ValueError:
    sys.exit("standard input did not arrive whole: a wrapper must pass it on (docker exec -i, kubectl exec -i)")
folder = os.path.join(os.path.expanduser("~"), ".cache", "draftsmith")
os.makedirs(folder, exist_ok=True)
path = os.path.join(folder, "shim-%s.py" % hashlib.sha256(told["source"].encode()).hexdigest()[:16])
if not os.path.exists(path):
    aside = "%s.%d" % (path, os.getpid())
    with open(aside, "w") as file:
        file.write(told["source"])
    os.replace(aside, path)
sys.exit(subprocess.run([sys.executable, path] + told["words"], input=told["spec"].encode()).returncode)
"""


class Unreachable(Exception):
    """Nothing answered; says nothing about any run."""


@dataclass(frozen=True)
class Host:
    """Where runs live. ssh: a destination as the user's OpenSSH configuration knows it, None for this machine; wrapper: a command
    that runs its arguments elsewhere (`docker exec -i box`), or, where a word is `{}`, a shell line in its place; python and
    folder: what runs there, and from where."""

    name: str = "local"
    ssh: str | None = None
    wrapper: tuple[str, ...] = ()
    python: str = "python3"
    folder: str | None = None

    @property
    def is_here(self) -> bool:
        """Whether commands run on this machine, in this process's own namespaces."""
        return self.ssh is None and not self.wrapper

    def argv(self, words: Sequence[str]) -> list[str]:
        """The local command that runs `words` there."""
        if "{}" in self.wrapper:
            words = [shlex.join(words) if word == "{}" else word for word in self.wrapper]
        else:
            words = [*self.wrapper, *words]
        # ssh joins its arguments with spaces and gives the line to the login shell.
        return [*SSH, self.ssh, shlex.join(words)] if self.ssh is not None else list(words)


def ask(host: Host, words: Sequence[str], spec: Mapping[str, Any] | None = None, timeout: float = 30.0) -> dict[str, Any]:
    """The shim's answer to one verb. Raises Unreachable if none came, RunError if the shim says that it could not obey."""
    if host.is_here and words[0] == "probe":
        return shim.probe(words[1], *map(int, words[2:]))
    told = json.dumps(spec or {})
    if host.is_here:
        argv = [sys.executable, shim.__file__, *words]
    else:
        told = json.dumps({"source": Path(shim.__file__).read_text(encoding="utf-8"), "words": list(words), "spec": told})
        argv = host.argv([host.python, "-c", BOOT])
    try:
        # In a session of its own, so that Ctrl-C ends whoever waits and not a supervisor that is just starting.
        done = subprocess.run(
            argv, input=told.encode(), capture_output=True, timeout=timeout, check=False, start_new_session=host.is_here
        )
    except FileNotFoundError as error:
        raise Unreachable(f"'{argv[0]}' is not a command on this machine") from error
    except subprocess.TimeoutExpired:
        raise Unreachable(f"no answer within {timeout:.0f} s") from None
    for line in reversed(done.stdout.decode("utf-8", "replace").splitlines()):
        if line.startswith(shim.SENTINEL):
            answer = json.loads(line.removeprefix(shim.SENTINEL))
            if not answer.get("ok"):
                raise RunError(f"{host.name}: {answer.get('error', 'the shim refused')}")
            return answer
    said = shim.redact(done.stderr.decode("utf-8", "replace")).strip().splitlines()[-3:]
    raise Unreachable(
        f"no answer from the shim ({argv[0]} ended with {done.returncode}{': ' if said else ''}{' | '.join(said)})"
    )
