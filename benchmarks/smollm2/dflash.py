"""The same checkpoint decoded by `dflash` 0.1.0 in fp32: does it give the very tokens?

python -m benchmarks.smollm2.dflash FOLDER
"""

import json
import sys
import time
from pathlib import Path

import torch
from dflash.model import DFlashDraftModel, dflash_generate

from draftsmith.build import load_one
from draftsmith.evaluate.suite import load_prompts


def main(folder: Path) -> None:
    """Decode the held-out prompts and compare with the outputs of the fp32 evaluation."""
    target = load_one(str(folder / "target"), dtype="fp32", device="cpu")
    drafter = DFlashDraftModel.from_pretrained(folder / "drafter", dtype=torch.float32).eval()
    outputs = [json.loads(line) for line in (folder / "fp32" / "outputs.jsonl").read_text().splitlines()]
    prompts = load_prompts(target, folder / "held-out.jsonl", len(outputs))
    same, begin = 0, time.perf_counter()
    limit = json.loads((folder / "fp32" / "report.json").read_text())["max_new_tokens"]
    for prompt, output in zip(prompts, outputs, strict=True):
        ids = torch.tensor([prompt.ids])
        out = dflash_generate(drafter, target.model, ids, max_new_tokens=limit, stop_token_ids=sorted(target.end_ids))
        same += out[0, len(prompt.ids) :].tolist() == output["ids"]
    told = {"prompts": len(prompts), "identical": same, "seconds": round(time.perf_counter() - begin, 1)}
    (folder / "dflash.json").write_text(json.dumps(told, indent=2) + "\n")
    print(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
