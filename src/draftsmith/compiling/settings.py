"""Dynamo and inductor settings that hold in every thread, whichever starts it and whenever.

Since torch 2.12 a setting made with `torch._dynamo.config.name = value` is a context variable: it holds in the thread that
made it and in no other, neither workers nor the threads in which autograd compiles a backward graph. The *default* of a
setting is process-wide on every release, so that is what is written here.
"""

from typing import Any

import torch._dynamo.config
import torch._inductor.config

SPARE_GRAPHS = 16


def _set_everywhere(module: Any, name: str, value: object) -> None:
    entry = module._config[name]
    entry.default = value
    # An override already made in this thread would hide the default here and nowhere else.
    setattr(module, name, value)


def apply_settings(graphs: int) -> None:
    """Allow `graphs` planned graphs per function and some unplanned ones; more is an error, never a silent fall to eager.

    CUDA graphs stay off: their bookkeeping belongs to the thread that first used them.
    """
    limit = graphs + SPARE_GRAPHS
    _set_everywhere(torch._dynamo.config, "recompile_limit", limit)
    _set_everywhere(torch._dynamo.config, "accumulated_recompile_limit", 4 * limit)
    _set_everywhere(torch._dynamo.config, "fail_on_recompile_limit_hit", True)
    _set_everywhere(torch._inductor.config, "triton.cudagraphs", False)


def settings_in_force() -> dict[str, object]:
    """The settings as the calling thread sees them."""
    return {
        "recompile_limit": torch._dynamo.config.recompile_limit,
        "accumulated_recompile_limit": torch._dynamo.config.accumulated_recompile_limit,
        "fail_on_recompile_limit_hit": torch._dynamo.config.fail_on_recompile_limit_hit,
        "triton.cudagraphs": torch._inductor.config.triton.cudagraphs,
    }
