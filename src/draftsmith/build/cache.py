"""`draftsmith cache`: the hidden states of all training packs on disk, so that training needs no target."""

import time

from draftsmith.build.inputs import make_cache
from draftsmith.build.plan import Resolved, resolve
from draftsmith.build.resume import Say
from draftsmith.config import Config
from draftsmith.errors import ConfigError
from draftsmith.pipeline.coordinator import Outcome
from draftsmith.pipeline.harvest import harvest
from draftsmith.pipeline.signals import StopRequest, stop_on_signals
from draftsmith.runs.reporter import RunReporter
from draftsmith.target.cache import StateCache
from draftsmith.target.capture import Capture
from draftsmith.types import HiddenStates, Tokens

EVERY_S = 10.0


def fill_cache(config: Config, *, dry_run: bool, say: Say) -> Outcome:
    """Capture what the cache of this configuration does not hold yet, or not whole; how far it came. What was written stays, and the same
    call goes on from there. dry_run: only say how large it will be. Raises DraftsmithError."""
    if config.hidden_states.folder is None:
        raise ConfigError("hidden_states.folder is not set; name the folder that is to hold the cache")
    reporter = RunReporter.from_environment()
    reporter.phase("imports")
    run = resolve(config.model_copy(update={"hidden_states": config.hidden_states.model_copy(update={"source": "hybrid"})}))
    reporter.phase("model")
    for line in run.describe(training=False):
        say(line)
    if dry_run:
        return Outcome(0, None)
    cache = make_cache(config, run.inputs, run.drafter, run.day)
    for name in cache.repair():
        say(f"states     shard {name} is missing or damaged; it is made anew")
    left = [tokens for tokens in run.packs if not cache.has(tokens)]
    cache.require_space(_tokens(left))
    say(f"states     {len(run.packs) - len(left)} of {len(run.packs)} packs are there already")
    return _fill(run, cache, left, say, reporter)


def _tokens(packs: list[Tokens]) -> int:
    return sum(tokens.filled for tokens in packs)


def _fill(run: Resolved, cache: StateCache, left: list[Tokens], say: Say, reporter: RunReporter) -> Outcome:
    begin = told = time.perf_counter()
    seen = 0

    def keep(number: int, hidden: HiddenStates) -> None:
        nonlocal told, seen
        cache.put(left[number], hidden)
        seen += left[number].filled
        now = time.perf_counter()
        if now - told >= EVERY_S or number + 1 == len(left):
            told = now
            rate = seen / (now - begin)
            eta = (_tokens(left) - seen) / rate
            say(f"states     pack {number + 1} of {len(left)}, {rate:,.0f} tokens/s, {eta:.0f} s left")
            reporter.phase("preparing", step=number + 1, steps=len(left))

    reporter.phase("preparing", step=0, steps=len(left))
    ids, final = run.drafter.target_layer_ids, cache.header.final
    sources = [Capture(target, ids, final=final) for target in run.targets]
    stop = StopRequest()
    try:
        with stop_on_signals(stop):
            outcome = harvest(sources, left, keep, cpu_threads=run.config.train.cpu_threads, stop=stop)
    finally:
        cache.close()
    size = cache.bytes_of(_tokens(run.packs)) / 1e9
    if stop:
        say(
            f"stopped on request after {outcome.step} of {len(left)} packs, which are kept; the same command goes on from there"
        )
    else:
        say(f"done: {len(run.packs)} packs, {_tokens(run.packs)} tokens, {size:.2f} GB in {cache.folder}")
    return outcome
