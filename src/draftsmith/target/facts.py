"""What a drafter is built from besides the target's weights, and how it is kept on disk so that training needs no target."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from draftsmith.draft.ends import FrozenEnds
from draftsmith.errors import TargetError


@dataclass(frozen=True)
class TargetFacts:
    """What a drafter is built from; of the weights only the two ends.

    name: folder, id or file it came from; ends: its own embedding and head, which the drafter borrows; end_ids: token ids that end
    a turn; config: its Hugging Face configuration; num_layers: decoder blocks L; digest: tells one target from another.
    """

    name: str
    tokenizer: PreTrainedTokenizerBase
    ends: FrozenEnds
    end_ids: frozenset[int]
    config: Any
    num_layers: int
    digest: str

    @property
    def embedding(self) -> Tensor:
        """Its embedding [V, D]."""
        return self.ends.embedding

    @property
    def head(self) -> Tensor:
        """Its head [V, D]."""
        return self.ends.head

    @property
    def vocab_size(self) -> int:
        """Rows of the embedding, padding rows included."""
        return self.embedding.shape[0]

    @property
    def hidden_size(self) -> int:
        """Width D of the hidden states."""
        return self.embedding.shape[1]

    def text_config(self) -> Any:
        """The configuration of the language model itself."""
        return self.config.get_text_config()


def save_facts(folder: Path, facts: TargetFacts) -> None:
    """Write facts to a folder: the library's configuration and tokenizer, embedding and head, and what is neither."""
    folder.mkdir(parents=True, exist_ok=True)
    facts.config.save_pretrained(folder)
    facts.tokenizer.save_pretrained(folder)
    ends = facts.ends
    tied = ends.head.data_ptr() == ends.embedding.data_ptr()
    tensors = {"embedding": ends.embedding} if tied else {"embedding": ends.embedding, "head": ends.head}
    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, folder / "ends.safetensors")
    rest = {
        "name": facts.name,
        "end_ids": sorted(facts.end_ids),
        "scale": ends.scale,
        "cap": ends.cap,
        "num_layers": facts.num_layers,
        "digest": facts.digest,
    }
    # Last, so that a folder that has it is whole.
    (folder / "facts.json").write_text(json.dumps(rest, indent=2) + "\n", encoding="utf-8")


def load_facts(folder: Path, device: torch.device) -> TargetFacts:
    """Facts as they were written. Raises TargetError."""
    try:
        rest = json.loads((folder / "facts.json").read_text(encoding="utf-8"))
        tensors = load_file(folder / "ends.safetensors", device=str(device))
        embedding = tensors["embedding"]
        return TargetFacts(
            rest["name"],
            AutoTokenizer.from_pretrained(folder),
            FrozenEnds(embedding, tensors.get("head", embedding), float(rest["scale"]), rest["cap"]),
            frozenset(rest["end_ids"]),
            AutoConfig.from_pretrained(folder),
            int(rest["num_layers"]),
            str(rest["digest"]),
        )
    except (OSError, ValueError, KeyError, TypeError, SafetensorError) as error:
        raise TargetError(
            f"'{folder}' does not hold a target's facts whole ({' '.join(str(error).split())[:200]}); "
            "write them again with `draftsmith cache`"
        ) from error
