"""How the shim is reached: on this machine, through the system's ssh, and through any wrapper command inside either.

No text of ours is ever parsed by a remote shell but one constant line: what to do, with which paths, travels as JSON on standard
input. A wrapper's exit code and silence prove nothing; only the shim's own line is an answer.
"""

import json
import os
import re
import shlex
import stat
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

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
# Takes {"files", "words", "spec"} from standard input, keeps the files in a folder of their own, runs the first word of the words.
BOOT = """
import hashlib, json, os, subprocess, sys
try:
    told = json.loads(sys.stdin.read())
except ValueError:
    sys.exit("standard input did not arrive whole: a wrapper must pass it on (docker exec -i, kubectl exec -i)")
key = hashlib.sha256(json.dumps(told["files"], sort_keys=True).encode()).hexdigest()[:16]
folder = os.path.join(os.path.expanduser("~"), ".cache", "draftsmith", "tools-" + key)
os.makedirs(folder, exist_ok=True)
for name, source in told["files"].items():
    path = os.path.join(folder, name)
    if not os.path.exists(path):
        aside = "%s.%d" % (path, os.getpid())
        with open(aside, "w", encoding="utf-8") as file:
            file.write(source)
        os.replace(aside, path)
words = [sys.executable, os.path.join(folder, told["words"][0])] + told["words"][1:]
sys.exit(subprocess.run(words, input=told["spec"].encode()).returncode)
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
        return [*SSH, *_shared_connection(), self.ssh, shlex.join(words)] if self.ssh is not None else list(words)


def _shared_connection() -> list[str]:
    """One connection for many questions, kept for a minute, behind a socket in a folder that is ours alone; else none is shared."""
    try:
        folder = Path(tempfile.gettempdir()) / f"draftsmith-ssh-{os.getuid()}"
        # A socket's path may have some hundred characters, and ssh reads an option's value in its own way.
        if len(str(folder)) > 45 or not re.fullmatch(r"[\w/.-]+", str(folder)):
            return []
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError:
        return []
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        return []
    return ["-o", "ControlMaster=auto", "-o", f"ControlPath={folder}/%C", "-o", "ControlPersist=60"]


def ask(
    host: Host,
    words: Sequence[str],
    spec: Mapping[str, Any] | None = None,
    timeout: float = 30.0,
    tool: str = "shim.py",
) -> dict[str, Any]:
    """The answer of the shim, or of another tool beside it, to one question there.

    Raises Unreachable if none came, RunError if it says that it could not obey.
    """
    if host.is_here and words[:1] == ["probe"]:
        return shim.probe(words[1], *map(int, words[2:]))
    told, here = json.dumps(spec or {}), Path(shim.__file__).parent
    if host.is_here:
        argv = [sys.executable, str(here / tool), *words]
    else:
        files = {name: (here / name).read_text(encoding="utf-8") for name in {"shim.py", tool}}
        told = json.dumps({"files": files, "words": [tool, *words], "spec": told})
        argv = host.argv([host.python, "-c", BOOT])
    # A file: the connection that ssh keeps for later may keep its standard error, and a pipe would not end before it.
    with open(os.memfd_create("errors"), "w+b") as errors:
        done = _run(host, argv, told, errors, timeout)
        errors.seek(0)
        said = shim.redact(errors.read().decode("utf-8", "replace")).strip().splitlines()[-3:]
    for line in reversed(done.stdout.decode("utf-8", "replace").splitlines()):
        if line.startswith(shim.SENTINEL):
            answer = json.loads(line.removeprefix(shim.SENTINEL))
            if not answer.get("ok"):
                raise RunError(f"{host.name}: {answer.get('error', 'it refused')}")
            return answer
    raise Unreachable(
        f"no answer from the shim ({argv[0]} ended with {done.returncode}{': ' if said else ''}{' | '.join(said)})"
    )


def _run(host: Host, argv: Sequence[str], told: str, errors: IO[bytes], timeout: float) -> subprocess.CompletedProcess[bytes]:
    try:
        # In a session of its own, so that Ctrl-C ends whoever waits and not a supervisor that is just starting.
        return subprocess.run(
            argv,
            input=told.encode(),
            stdout=subprocess.PIPE,
            stderr=errors,
            timeout=timeout,
            check=False,
            start_new_session=host.is_here,
        )
    except FileNotFoundError as error:
        raise Unreachable(f"'{argv[0]}' is not a command on this machine") from error
    except subprocess.TimeoutExpired:
        raise Unreachable(f"no answer within {timeout:.0f} s") from None
