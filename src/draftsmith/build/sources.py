"""A run's sources of hidden states, as its configuration names them."""

from collections.abc import Sequence
from functools import partial
from pathlib import Path

from draftsmith.build.inputs import load_again, make_cache
from draftsmith.build.plan import Resolved
from draftsmith.build.resume import Say
from draftsmith.target.cache import StateCache
from draftsmith.target.capture import Capture
from draftsmith.target.load import Target
from draftsmith.target.served import StateFiles, StatesFromFiles, StatesFromServer
from draftsmith.target.sources import CachedStates, StateSource


def make_sources(run: Resolved, say: Say) -> tuple[Sequence[StateSource], StateCache | None]:
    """One source for each thread that gives states, and the cache they are kept in, if any. Raises DraftsmithError."""
    ids, section = run.drafter.target_layer_ids, run.config.hidden_states
    folder = Path(section.folder) if section.folder is not None else None

    def capture(target: Target) -> Capture:
        return Capture(target, ids, final=cache.header.final if cache is not None else run.config.train.loss == "kl")

    cache = run.inputs.cache
    if section.source == "live":
        return [capture(target) for target in run.targets], None
    reader = StateFiles(ids, run.facts.hidden_size, run.facts.embedding.dtype)
    if section.source == "files":
        assert folder is not None
        files = StatesFromFiles(folder, reader)
        files.check_complete(run.packs)
        return [files], None
    if section.source == "server":
        assert section.url is not None
        assert section.model is not None
        return [StatesFromServer(section.url, section.model, folder, reader)], None
    if section.source == "cached":
        assert cache is not None
        cache.check_complete(run.packs)
        return [CachedStates(cache, lambda: capture(load_again(run.config, run.target_devices[0], run.facts)), say)], cache
    cache = make_cache(run.config, run.inputs, run.drafter, run.day)
    for shard in cache.missing():
        say(f"states     shard {shard} is missing from {cache.folder}; it is made anew")
        cache.forget(shard)
    cache.require_space(sum(tokens.filled for tokens in run.packs if not cache.covers(tokens)))
    return [CachedStates(cache, partial(capture, target), say, target.device) for target in run.targets], cache
