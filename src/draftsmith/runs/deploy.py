"""Receive code as a git bundle and check it out. Standard library only; sent beside shim.py and run by the host's own Python.

    python3 deploy.py < {"folder": where, "commit": id}                     what is there: {"ok", "has": bool, "head": id or ""}
    python3 deploy.py < {"folder": where, "commit": id, "bundle": base64}   take it and stand at the commit

Answers one line, as the shim does. Nothing that differs from a commit is ever overwritten, and no code below a live run.
"""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
import tempfile

if __package__:
    from draftsmith.runs import shim
else:  # sent to a host that has nothing else of ours
    sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)))
    import shim  # type: ignore[import-not-found, no-redef]


class Refused(Exception):
    """Why the code was not taken, for people."""


def git(folder: str, *words: str) -> str:
    """What git said; raises Refused with its complaint."""
    # Nothing of the caller's environment may point git elsewhere.
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    done = subprocess.run(["git", "-C", folder, *words], capture_output=True, text=True, env=env, check=False)
    if done.returncode:
        raise Refused(f"git {words[0]} in {folder}: {' '.join((done.stderr or done.stdout).split())}")
    return done.stdout.strip()


def asked(folder: str, *words: str) -> str:
    """The same where no answer is an answer: empty."""
    try:
        return git(folder, *words) if os.path.isdir(os.path.join(folder, ".git")) else ""
    except (Refused, OSError):
        return ""


def users_of(folder: str) -> list[str]:
    """Attempts that live and were started in the folder or below it."""
    real, found = os.path.realpath(folder), set()
    for process in shim.members(""):
        mark = re.search(rf"{shim.ATTEMPT}=([^\0]*)", shim.read_text(f"/proc/{process['pid']}/environ"))
        cwd = shim.read_json(f"{mark.group(1)}/record.json").get("cwd") if mark else None
        if mark and cwd and (os.path.realpath(cwd) + os.sep).startswith(real + os.sep):
            found.add(mark.group(1))
    return sorted(found)


def receive(folder: str, commit: str, bundle: bytes | None) -> None:
    """Stand at `commit` in `folder`, made if need be."""
    if os.path.isdir(folder) and os.listdir(folder) and not os.path.isdir(os.path.join(folder, ".git")):
        raise Refused(f"{folder} holds files and is no repository; give the host another folder")
    os.makedirs(folder, exist_ok=True)
    if not os.path.isdir(os.path.join(folder, ".git")):
        git(folder, "init", "-q")
    changed = git(folder, "status", "--porcelain", "--untracked-files=no")
    if changed:
        raise Refused(
            f"{folder} has changes that no commit holds: {' '.join(changed.split()[1::2])}; commit or drop them there"
        )
    users = users_of(folder)
    if users:
        raise Refused(f"{users[0]} runs from {folder}; stop it first, or give the host another folder")
    if bundle is not None:
        with tempfile.NamedTemporaryFile(suffix=".bundle") as file:
            file.write(bundle)
            file.flush()
            git(folder, "fetch", "-q", file.name, "HEAD")
    git(folder, "checkout", "-q", "--detach", commit)


if __name__ == "__main__":
    told = json.load(sys.stdin)
    place = os.path.abspath(os.path.expanduser(told["folder"]))
    try:
        known, head = asked(place, "cat-file", "-t", told["commit"]) == "commit", asked(place, "rev-parse", "HEAD")
        if known or told.get("bundle") is not None:
            receive(place, told["commit"], None if known else base64.b64decode(told["bundle"]))
        answer = {"ok": True, "has": known, "head": head}
    except (Refused, OSError) as error:
        answer = {"ok": False, "error": str(error)}
    print(shim.SENTINEL + json.dumps(answer), flush=True)
