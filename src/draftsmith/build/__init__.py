"""The only assembly point: configuration to objects, and the jobs the command line runs."""

from draftsmith.build.cache import fill_cache
from draftsmith.build.jobs import evaluate, export, generate, generate_together, load_one, load_pair, look_at_data
from draftsmith.build.plan import resolve
from draftsmith.build.regenerate import Writing, read_key, regenerate_by_server, regenerate_here
from draftsmith.build.run import train

__all__ = [
    "Writing",
    "evaluate",
    "export",
    "fill_cache",
    "generate",
    "generate_together",
    "load_one",
    "load_pair",
    "look_at_data",
    "read_key",
    "regenerate_by_server",
    "regenerate_here",
    "resolve",
    "train",
]
