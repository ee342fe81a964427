"""Bring the commit that stands here to a host, as a git bundle through the host's own transport."""

import base64
import os
import subprocess
from pathlib import Path

from draftsmith.errors import RunError, UsageError
from draftsmith.runs.transport import Host, ask

SYNC_S = 600.0


def _git(folder: Path, *words: str) -> bytes:
    # A hook or an alias of the shell may have set GIT_DIR and the like.
    env = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(["git", "-C", str(folder), *words], capture_output=True, env=env, check=False)
    except FileNotFoundError as error:
        raise RunError(
            "git is not installed here; install it, or bring the code there yourself and leave out --sync"
        ) from error
    if done.returncode:
        raise RunError(f"git {words[0]} in {folder}: {' '.join(done.stderr.decode('utf-8', 'replace').split())}")
    return done.stdout


def sync(host: Host, code: Path) -> str:
    """Make the host's folder stand at the commit of the repository around `code`; returns the commit.

    Only what the host lacks travels. Raises UsageError for a host without a folder, RunError if files here differ from the commit,
    if the host's folder has changes of its own, or if a run lives from it.
    """
    if host.is_here or host.folder is None:
        raise UsageError(f"host '{host.name}' has no folder to bring code to; set `folder` in the hosts file")
    changed = _git(code, "status", "--porcelain", "--untracked-files=no").decode().split("\n")
    if any(changed):
        names = ", ".join(line[3:] for line in changed if line)
        raise RunError(f"{names}: changed since the last commit, so no commit would say what runs there; commit first")
    commit = _git(code, "rev-parse", "HEAD").decode().strip()
    spec = {"folder": host.folder, "commit": commit}
    there = ask(host, [], spec, tool="deploy.py")
    if not there["has"]:
        # The host's own commit, if we know it, need not travel again.
        known = bool(there["head"]) and there["head"].encode() in _git(code, "rev-list", "HEAD").split()
        bundle = _git(code, "bundle", "create", "-q", "-", "HEAD", *([f"^{there['head']}"] if known else []))
        ask(host, [], {**spec, "bundle": base64.b64encode(bundle).decode()}, timeout=SYNC_S, tool="deploy.py")
    return commit
