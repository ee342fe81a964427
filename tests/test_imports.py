"""Import directions between the rooms, as DESIGN.md draws them."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[1] / "src" / "draftsmith"
ROOMS = {"data", "target", "draft", "compiling", "pipeline", "checkpoint", "decode", "evaluate", "runs", "demo"}
BASE = {"types", "errors", "spans"}
# What each room may import of the package, itself aside.
ALLOWED = {
    "types": set(),
    "errors": set(),
    "spans": set(),
    "config": {"errors"},
    "draft": BASE,
    "data": BASE | {"config", "draft"},
    "target": BASE | {"config", "draft"},
    "checkpoint": BASE | {"config", "draft"},
    "compiling": BASE | {"config", "draft"},
    "decode": BASE | {"draft", "target"},
    "pipeline": BASE | {"config", "draft", "data", "target", "checkpoint", "compiling"},
    "evaluate": BASE | {"config", "decode", "data", "checkpoint", "target"},
    "runs": BASE,
    "build": ROOMS - {"demo"} | BASE | {"config"},
    "demo": ROOMS | BASE | {"config", "build"},
    "cli": {"errors", "config", "build", "demo", "runs", "pipeline", "decode", "making"},
    "making": {"errors", "config", "build", "data", "decode"},
    "__main__": {"cli"},
    "__init__": BASE | {"config", "build", "checkpoint"},
}


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imported_rooms(path: Path) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        for name in names:
            parts = name.split(".")
            if parts[0] == "draftsmith" and len(parts) > 1 and parts[1] in ALLOWED | {room: set() for room in ROOMS}:
                found.add(parts[1])
    return found


FILES = sorted(SOURCE.rglob("*.py"))


@pytest.mark.parametrize("path", FILES, ids=[str(p.relative_to(SOURCE)) for p in FILES])
def test_a_room_imports_only_what_it_may(path: Path) -> None:
    room = room_of(path)
    over = imported_rooms(path) - ALLOWED[room] - {room}
    assert not over, f"{room} may not import {sorted(over)}"


def test_public_names() -> None:
    import draftsmith

    names = ["Config", "DraftsmithError", "__version__", "export", "load_config", "load_drafter", "load_pair", "train"]
    assert names == draftsmith.__all__
    assert all(getattr(draftsmith, name) is not None for name in names)
    with pytest.raises(AttributeError, match="no public name 'trian'"):
        draftsmith.trian  # noqa: B018


def test_importing_the_package_loads_no_torch() -> None:
    code = "import sys, draftsmith, draftsmith.cli; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_threads_start_in_the_pipeline_and_nowhere_else() -> None:
    starts = re.compile(r"threading\.Thread\(|\(threading\.Thread\)|Executor\(|multiprocessing")
    users = {room_of(p) for p in FILES if starts.search(p.read_text(encoding="utf-8"))}
    assert users == {"pipeline"}


def test_no_pickle_and_no_shell() -> None:
    for path in FILES:
        text = path.read_text(encoding="utf-8")
        for word in ("torch.load(", "import pickle", "shell=True", "os.system(", "torch.manual_seed"):
            allowed = word == "torch.manual_seed" and room_of(path) == "demo"
            assert word not in text or allowed, f"{path.name} uses {word}"


def test_no_file_holds_two_ideas() -> None:
    # The shim is copied to machines that have nothing else of ours, so all of it is one file.
    limits = {"shim.py": 399}
    long = {p.name: n for p in FILES if (n := len(p.read_text().splitlines())) > limits.get(p.name, 350)}
    assert not long
