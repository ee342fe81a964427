"""Draftsmith: train the draft models of speculative decoding in one process, and know at every moment what the run does.

The public names below are loaded on first use, so that `import draftsmith` costs nothing.
"""

from importlib import import_module
from importlib.metadata import version
from typing import Any

_HOME = {
    "Config": "draftsmith.config",
    "load_config": "draftsmith.config",
    "train": "draftsmith.build",
    "load_pair": "draftsmith.build",
    "export": "draftsmith.build",
    "load_drafter": "draftsmith.checkpoint.export",
    "DraftsmithError": "draftsmith.errors",
}
__version__ = version("draftsmith")
__all__ = ["Config", "DraftsmithError", "__version__", "export", "load_config", "load_drafter", "load_pair", "train"]


def __getattr__(name: str) -> Any:
    if name in _HOME:
        return getattr(import_module(_HOME[name]), name)
    raise AttributeError(f"module 'draftsmith' has no public name '{name}'; it has {', '.join(__all__)}")
