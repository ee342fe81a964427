"""What the pipeline adds to its stages: one target thread and one drafter thread, one core each, and the hand-off between them.

    python benchmarks/pipeline.py --json

`wall_over_busiest` is the wall time of a step over the busy time of the busier stage, by the run's own counters: 1 is a pipeline that
adds nothing. `handoff_fraction` is what a pack's way from one thread to the other takes of a step: an exchange through the channel,
timed by itself, and the copy to the drafter's device and type. The spans say where each thread waits, in milliseconds a step.
"""

import argparse
import sys
import time
from pathlib import Path


def channel_seconds(tries: int = 20_000) -> float:
    """One put and one get that need not wait."""
    from draftsmith.pipeline.channel import Channel

    channel: Channel[object] = Channel(2)
    begin = time.perf_counter()
    for number in range(tries):
        channel.put(number, None)
        channel.get()
    return (time.perf_counter() - begin) / tries


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, default=7)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    import torch

    from benchmarks.pairs import middle, show
    from benchmarks.parts import random_packs, random_target, run_job, scratch
    from draftsmith.compiling.cache import use_cache
    from draftsmith.compiling.compiler import Compiler

    torch.set_num_threads(1)
    target, packs = random_target(), random_packs(512, 24)
    walls, handoffs, exchange_s, megabytes = [], [], channel_seconds(), 512 * 3 * target.embedding.shape[1] * 4 / 1e6
    spans: dict[str, dict[str, list[float]]] = {}
    with scratch() as folder, use_cache(folder), Compiler(enabled=True, unplanned="error") as compiler:
        run_job(target, packs, compiler, steps=2, replicas=1)
        for _ in range(arguments.runs):
            _, events = run_job(target, packs, compiler, steps=arguments.steps, replicas=1)
            steps = [event for event in events if event["kind"] == "step"]
            # The channel is full, or empty, after a few steps; what the counters gained from there on is compared with the wall.
            first, last = steps[len(steps) // 6], steps[-1]
            count, wall = last["step"] - first["step"], last["at"] - first["at"]
            gained = {
                thread: {name: s - first["spans_s"][thread].get(name, 0.0) for name, s in seconds.items()}
                for thread, seconds in last["spans_s"].items()
            }
            busy = {t: sum(s for name, s in seconds.items() if name not in ("wait", "gate")) for t, seconds in gained.items()}
            walls.append(wall / max(busy.values()))
            handoffs.append((gained["drafter-0"]["copy"] / count + exchange_s) / (wall / count))
            for thread, seconds in gained.items():
                for name, s in seconds.items():
                    spans.setdefault(thread, {}).setdefault(name, []).append(1000 * s / count)
    row = {
        "name": "pipeline",
        "shape": "context 512, 64 anchors x 8, width 128, 3 layers, 1 target + 1 drafter thread",
        "dtype": "fp32",
        "pairs": arguments.runs,
        "wall_over_busiest": middle(walls),
        "handoff_fraction": middle(handoffs, 5),
        "channel_us": round(1e6 * exchange_s, 1),
        "handoff_mb": round(megabytes, 2),
        "spans_ms": {thread: {name: middle(each, 2) for name, each in names.items()} for thread, names in spans.items()},
    }
    show(row, as_json=arguments.json)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    main()
