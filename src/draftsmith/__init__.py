"""Draftsmith: train the draft models of speculative decoding in one process, and know at every moment what the run does."""

from importlib.metadata import version

__version__ = version("draftsmith")
__all__ = ["__version__"]
