"""The only assembly point: configuration to objects, and the jobs the command line runs."""

from draftsmith.build.jobs import evaluate, export, generate, load_pair, look_at_data
from draftsmith.build.plan import resolve
from draftsmith.build.run import train

__all__ = ["evaluate", "export", "generate", "load_pair", "look_at_data", "resolve", "train"]
