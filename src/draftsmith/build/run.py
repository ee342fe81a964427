"""Training: a resolved run to replicas, compiler, events and a coordinator, and through it."""

import copy
import os
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import date
from pathlib import Path

import yaml

from draftsmith.build.inputs import load_again
from draftsmith.build.plan import Resolved, resolve
from draftsmith.build.resume import Say, check_fit, find_resume, run_lock
from draftsmith.build.sources import make_sources
from draftsmith.checkpoint import save as checkpoints
from draftsmith.checkpoint.export import check_weights
from draftsmith.compiling.cache import use_cache
from draftsmith.compiling.compiler import Compiler
from draftsmith.compiling.warmup import worth_compiling
from draftsmith.config import Config
from draftsmith.decode.speculate import Speculator
from draftsmith.draft.model import Drafter
from draftsmith.errors import CaptureError
from draftsmith.evaluate.suite import Prompt, load_prompts, measure_tau
from draftsmith.pipeline.coordinator import Coordinator, Emit, Judge, Outcome, Save
from draftsmith.pipeline.plan import generator_for, learning_rate
from draftsmith.pipeline.profile import Profile
from draftsmith.pipeline.replicas import Replica
from draftsmith.pipeline.signals import StopRequest, stop_on_signals
from draftsmith.pipeline.step import blank_batch, drafter_core, run_pack
from draftsmith.pipeline.workers import Evaluate, Guard, Job
from draftsmith.runs.events import RunEvents
from draftsmith.runs.reporter import RunReporter
from draftsmith.target.load import Target


def build_replicas(run: Resolved, checkpoint: checkpoints.Checkpoint | None) -> list[Replica]:
    """One replica per drafter device, all with the same weights."""
    first = Drafter(run.drafter, run.attention, recompute=run.config.train.activation_checkpointing)
    first.initialise(generator_for(run.config.train.seed, "weights", 0))
    if checkpoint is not None:
        check_weights(first, checkpoint.weights, f"checkpoint at step {checkpoint.step}")
    replicas = []
    for rank, device in enumerate(run.drafter_devices):
        drafter = copy.deepcopy(first).to(device)
        # On the target's own device the drafter borrows the very same tensors; elsewhere it needs a copy, one if tied.
        replica = Replica(rank, drafter, run.facts.ends.to(device), run.config.train, len(run.drafter_devices))
        if checkpoint is not None:
            replica.load(checkpoint.weights, checkpoint.optimizer)
        replicas.append(replica)
    return replicas


def make_compiler(run: Resolved, replica: Replica, before: bool | None, say: Say) -> Compiler:
    """The run's compiler; for `auto`, after timing an eager step of the largest bucket on `replica`.

    before: what the checkpoint was trained with. Auto keeps to it, since compiled and eager steps differ in the last bits.
    """
    enabled = run.config.compile.enabled
    if run.attention == "flex":
        # Called eagerly it compiles by itself, outside the gate.
        enabled = True
    if before is not None and enabled == "auto":
        enabled = before
    if before is not None and enabled != before:
        say(f"compile    was {before} up to the checkpoint and is {enabled} from here: losses may differ in the last digits")
    buckets = {p.bucket for p in run.packs}
    graphs = len(buckets) * len(set(run.drafter_devices))
    if enabled == "auto":
        dtype = run.facts.embedding.dtype
        blank = blank_batch(max(buckets), replica.drafter, dtype, replica.flat.device)
        seconds = []
        for _ in range(3):
            begin = time.perf_counter()
            run_pack(replica.drafter, replica.ends, blank, run.settings)
            seconds.append(time.perf_counter() - begin)
        replica.gradient.zero_()
        enabled, told = worth_compiling(
            steps=run.plan.steps,
            step_seconds=min(seconds) * run.plan.share,
            graphs=graphs,
            device=run.drafter_devices[0].type,
        )
        say(f"compile    auto chose {'compiled' if enabled else 'eager'}: {told}")
    return Compiler(enabled=enabled, graphs=graphs, unplanned=run.config.compile.unplanned)


def _saver(run: Resolved, root: Path, compiled: bool, emit: Emit) -> Save:
    train, fingerprint, recipe = run.config.train, run.fingerprint(), run.recipe()

    def save(step: int, replicas: Sequence[Replica], digest: str, spared: frozenset[int]) -> None:
        checkpoint = checkpoints.Checkpoint(
            step=step,
            config=run.drafter,
            weights=replicas[0].weights(),
            optimizer=replicas[0].optimizer_state(replicas),
            scheduler={
                "name": "cosine",
                "last_step": step,
                "peak_lr": train.lr,
                "warmup": train.warmup,
                "steps": run.plan.steps,
                "next_lr": learning_rate(step, peak=train.lr, steps=run.plan.steps, warmup=train.warmup),
            },
            rng={
                "seed": train.seed,
                "rule": "every draw is a function of seed, purpose and stream position (pipeline/plan.py)",
            },
            state={
                "epoch": step * run.plan.per_step / run.plan.packs,
                "max_steps": run.plan.steps,
                "weights_sha256": digest,
                "day": run.day.isoformat(),
                "compiled": compiled,
                "fingerprint": fingerprint,
                "recipe": recipe,
            },
        )
        path = checkpoints.save_checkpoint(root, checkpoint, run.config.checkpoint.keep, spared)
        emit("checkpoint", {"step": step, "path": str(path), "weights_sha256": digest})

    return save


def _evaluator(run: Resolved, target: Target | None, prompts: list[Prompt]) -> Evaluate | None:
    if target is None:
        return None

    def evaluate(drafter: Drafter, guard: Guard, interrupted: Callable[[], bool]) -> Mapping[str, object] | None:
        with guard():
            # In the target's type at once, to which it would be cast at every pass.
            speculator = Speculator(target, drafter.to(target.device, target.embedding.dtype))
        limit = run.config.evaluate.max_new_tokens
        tau = measure_tau(speculator, prompts, limit, guard=guard, interrupted=interrupted)
        return None if tau is None else {"tau": tau, "prompts": len(prompts)}

    return evaluate


def _judge(root: Path, emit: Emit) -> Judge:
    def judge(step: int, figures: Mapping[str, object]) -> None:
        best = checkpoints.mark_best(root, step, float(str(figures["tau"])))
        emit("evaluation", {"step": step, **figures, "best": best})

    return judge


def _write_config(config: Config, root: Path) -> None:
    aside = root / ".config.yaml.tmp"
    aside.write_text(yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False), encoding="utf-8")
    os.replace(aside, root / "config.yaml")


def train(config: Config, *, resume: str | None, say: Say, profile_steps: int = 0) -> Outcome:
    """Train to the end of the plan, or to the first SIGTERM or SIGINT, saving last; profile that many steps, into `profile.json` of
    the run's folder. Raises DraftsmithError.

    Until the first worker starts, signals do what they do to any process: there is nothing to save yet.
    """
    root = Path(config.run.dir)
    reporter = RunReporter.from_environment()
    reporter.phase("imports")
    with run_lock(root):
        checkpoint = find_resume(root, resume, say)
        run = resolve(config, date.fromisoformat(checkpoint.state["day"]) if checkpoint is not None else None)
        if checkpoint is not None:
            check_fit(run, checkpoint, say)
        reporter.phase("model")
        for line in run.describe():
            say(line)
        prompts, judge = [], None
        if config.evaluate.prompts is not None:
            judge = run.targets[0] if run.targets else load_again(config, run.target_devices[0], run.facts)
            prompts = load_prompts(judge, config.evaluate.prompts, config.evaluate.count, run.chat())
        replicas = build_replicas(run, checkpoint)
        checkpoints.require_space(root, 2 * checkpoints.checkpoint_bytes(replicas[0].weights()))
        _write_config(config, root)
        sources, cache = make_sources(run, say)
        start_step = checkpoint.step if checkpoint is not None else 0
        before = checkpoint.state.get("compiled") if checkpoint is not None else None
        if start_step:
            say(f"resuming at step {start_step}")
        stop = StopRequest()
        with (
            use_cache(Path(config.compile.cache).expanduser()),
            make_compiler(run, replicas[0], before, say) as compiler,
            RunEvents(
                root, steps=run.plan.steps, start_step=start_step, log_every=config.run.log_every, reporter=reporter
            ) as events,
            stop_on_signals(stop),
        ):
            job = Job(
                replicas=replicas,
                sources=sources,
                packs=run.packs,
                plan=run.plan,
                settings=run.settings,
                peak_lr=config.train.lr,
                warmup=config.train.warmup,
                channel_capacity=config.train.channel_capacity,
                cpu_threads=config.train.cpu_threads,
                checkpoint_every=config.checkpoint.every,
                compiler=compiler,
                core=compiler.compiled(drafter_core),
            )
            profile = Profile(profile_steps, root / "profile.json", events.say) if profile_steps else None
            coordinator = Coordinator(
                job,
                save=_saver(run, root, compiler.enabled, events.emit),
                evaluate=_evaluator(run, judge, prompts),
                judge=_judge(root, events.emit),
                emit=events.emit,
                stop=stop,
                profile=profile,
            )
            try:
                return coordinator.run(start_step)
            finally:
                if profile is not None:
                    profile.close()
                if cache is not None:
                    try:
                        cache.close()
                    except CaptureError as error:
                        # It must not cover how the run ended.
                        say(f"states     {error}")
                if compiler.enabled:
                    events.emit("compile", compiler.account())
