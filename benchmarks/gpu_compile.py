"""The check of `compile_threads.py` on a GPU: flex attention, block masks and backward graphs compiled between threads.

    python benchmarks/gpu_compile.py --json

Three threads capture from eager Hugging Face models and four train compiled drafters, all on one CUDA device; two context
lengths are planned and one is not. Every hidden state, loss and gradient is compared with an eager SDPA reference computed
by one thread beforehand. The cache is empty at the start. Ends with exit code 1 unless there were no errors, no wrong
values and no hangs, and with 2 where there is no CUDA device. Under six minutes, compilation included.
"""

import argparse
import sys
import tempfile
import time
from pathlib import Path


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=90.0, help="after warm-up")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    import torch

    from benchmarks.compile_threads import Stage, run_mechanism
    from benchmarks.pairs import show
    from draftsmith.compiling.cache import use_cache

    if not torch.cuda.is_available():
        print("gpu_compile: no CUDA device here; nothing was run", file=sys.stderr)
        return 2
    stage = Stage(planned=(512, 1024), unplanned=(768,), device="cuda", attention="flex", dim=256, anchors=64)
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory() as folder, use_cache(Path(folder)):
        row = run_mechanism("gate", arguments.seconds, stage) | {"whole_s": round(time.perf_counter() - begin, 1)}
    show(row, as_json=arguments.json)
    return int(bool(row["errors"] or row["wrong"] or row["hangs"]))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parents[1]))
    sys.exit(main())
