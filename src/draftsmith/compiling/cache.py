"""The compile cache: artefacts kept per machine and torch version, so that a second start need not compile again.

Nothing here removes a cache: another live run may be using it. Inductor reads entries that are truncated, foreign or gone as misses.
"""

import hashlib
import os
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

VARIABLE = "TORCHINDUCTOR_CACHE_DIR"


def cache_folder(root: Path) -> Path:
    """Where this machine with this torch keeps its artefacts under `root`: compiled code depends on processor and GPUs."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text(encoding="utf-8", errors="replace").splitlines() if info.exists() else []
    processor = sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))})
    gpus = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
    key = "|".join([torch.__version__, platform.python_version(), platform.machine(), *processor, *gpus])
    return root / f"torch-{torch.__version__.split('+')[0]}-{hashlib.sha256(key.encode()).hexdigest()[:12]}"


@contextmanager
def use_cache(root: Path) -> Iterator[Path]:
    """Point inductor at the cache for the length of a run; must enclose the first compilation."""
    folder = cache_folder(root)
    folder.mkdir(parents=True, exist_ok=True)
    before = os.environ.get(VARIABLE)
    os.environ[VARIABLE] = str(folder)
    try:
        yield folder
    finally:
        if before is None:
            del os.environ[VARIABLE]
        else:
            os.environ[VARIABLE] = before
