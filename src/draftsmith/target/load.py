"""Frozen target replicas from a Hugging Face folder or id, or a GGUF file."""

import copy
import hashlib
import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoTokenizer,
    GenerationConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.utils.logging import disable_progress_bar

from draftsmith.config import TargetSection
from draftsmith.draft.ends import FrozenEnds
from draftsmith.draft.packed import PackedLinear, pack_linears
from draftsmith.errors import TargetError
from draftsmith.target.facts import TargetFacts

M = TypeVar("M", bound=nn.Module)
# Keys of a configuration that change nothing of what a model computes.
NOT_THE_MODEL = {"transformers_version", "dtype", "torch_dtype", "architectures", "name_or_path", "use_cache"}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Target(TargetFacts):
    """One frozen replica on one device, used by one thread. decoder: what runs the blocks; blocks_path: where the list of them lies in
    the model, for example `model.layers`."""

    model: PreTrainedModel
    device: torch.device
    decoder: nn.Module
    blocks_path: str

    @property
    def blocks(self) -> nn.ModuleList:
        """Its decoder blocks in order."""
        return find_blocks(self.model, self.blocks_path)


def share_weights(module: M) -> M:
    """A copy of a frozen module with module objects (and so hooks) of its own over the same parameters and buffers."""
    tensors = [*module.parameters(), *module.buffers()]
    return copy.deepcopy(module, {id(t): t for t in tensors})


def packed_for_decoding(target: Target) -> Target:
    """The target with its linear layers packed for the CPU it is on, in place; as it is elsewhere. Nothing can be trained on it."""
    pack_linears(target.model)
    head = target.model.get_output_embeddings()
    if not isinstance(head, PackedLinear):
        return target
    # Whatever still lay in the checkpoint's file would keep all of it mapped, next to what was packed from it.
    own = {id(p): p.detach().clone() for p in target.model.parameters()}
    for parameter in target.model.parameters():
        parameter.data = own[id(parameter)]
    weight = target.model.get_input_embeddings().weight
    assert isinstance(weight, Tensor)
    embedding = weight.detach()
    tied = target.head.data_ptr() == target.embedding.data_ptr()
    ends = replace(target.ends, embedding=embedding, head=embedding if tied else target.head.clone(), packed=head.packed)
    return replace(target, ends=ends)


def find_blocks(model: nn.Module, path: str) -> nn.ModuleList:
    """The list of decoder blocks at a path of a model."""
    blocks = model.get_submodule(path)
    assert isinstance(blocks, nn.ModuleList)
    return blocks


def _hook_points(name: str, model: Any, given: str | None) -> tuple[nn.Module, str]:
    """The decoder and the path of its blocks; raises TargetError naming what could be meant."""
    lists = {path: module for path, module in model.named_modules() if isinstance(module, nn.ModuleList) and len(module) > 1}
    told = ", ".join(f"{path} ({len(module)} of {type(module[0]).__name__})" for path, module in list(lists.items())[:8])
    cure = f"set target.blocks to the list that holds the decoder's blocks; this model has {told or 'no list of modules'}"
    if given is not None:
        if given not in lists:
            raise TargetError(f"target.blocks is '{given}', which is no list of blocks of {type(model).__name__}; {cure}")
        return model.get_submodule(given.rpartition(".")[0]), given
    decoder = model.get_decoder()
    path = next((path for path, module in lists.items() if module is getattr(decoder, "layers", None)), None)
    if path is None:
        raise TargetError(
            f"target '{name}' ({type(model).__name__}): its decoder has no list 'layers' to take hidden states from; {cure}"
        )
    return decoder, path


def _wrap(name: str, model: Any, tokenizer: PreTrainedTokenizerBase, device: torch.device, given: str | None) -> Target:
    model = model.to(device).eval().requires_grad_(False)
    decoder, path = _hook_points(name, model, given)
    blocks = find_blocks(model, path)
    ends, end_ids = _ends(name, model, decoder, blocks), _end_ids(tokenizer, model.generation_config)
    # Penalties and the like, which some targets bring along, would make "greedy" mean something else here than when drafts are checked.
    model.generation_config = GenerationConfig(eos_token_id=sorted(end_ids) or None)
    digest = _digest(model)
    return Target(name, tokenizer, ends, end_ids, model.config, len(blocks), digest, model, device, decoder, path)


def _digest(model: PreTrainedModel) -> str:
    """SHA-256 over a sample of every parameter and over what the configuration says of the computation."""
    told = {key: value for key, value in model.config.to_dict().items() if not key.startswith("_") and key not in NOT_THE_MODEL}
    digest = hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode())
    for tensor in (*model.parameters(), *model.buffers()):
        flat = tensor.detach().flatten()
        digest.update(flat[:: max(1, flat.numel() // 1024)].float().cpu().numpy().tobytes())
    return digest.hexdigest()


def _ends(name: str, model: Any, decoder: Any, blocks: nn.ModuleList) -> FrozenEnds:
    """Embedding and head with what the family does around them, tried on two tokens: whoever does more than we know is refused."""
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    cap = getattr(model.config.get_text_config(), "final_logit_softcapping", None)
    ends = FrozenEnds(
        embedding.weight.detach(),
        head.weight.detach(),
        float(getattr(embedding, "embed_scale", 1.0)),
        float(cap) if cap else None,
    )
    ids = torch.tensor([[1, ends.embedding.shape[0] // 2]], device=ends.embedding.device)
    entered: list[Tensor] = []

    def keep(_block: nn.Module, args: tuple[Tensor, ...], kwargs: dict[str, Tensor]) -> None:
        entered.append(args[0] if args else kwargs["hidden_states"])

    hook = blocks[0].register_forward_pre_hook(keep, with_kwargs=True)
    try:
        with torch.inference_mode():
            logits = model(ids, use_cache=False).logits
            left = decoder(ids, use_cache=False).last_hidden_state
            wrong = [] if torch.equal(entered[0], ends.embed(ids)) else ["embedded tokens"]
            difference = (ends.logits(left).float() - logits.float()).abs().max()
            wrong += [] if difference <= 0.02 * logits.float().abs().max() else ["logits"]
    finally:
        hook.remove()
    if wrong:
        raise TargetError(
            f"target '{name}' ({type(model).__name__}): its {' and '.join(wrong)} are not those of embedding and head with a scale and a cap; "
            "this family does something more there, which a drafter would have to do too, and is not supported yet"
        )
    return ends


def _end_ids(tokenizer: PreTrainedTokenizerBase, generation: GenerationConfig | None) -> frozenset[int]:
    ends = generation.eos_token_id if generation is not None else None
    found = set(ends if isinstance(ends, list) else [] if ends is None else [ends])
    if tokenizer.eos_token_id is not None:
        found.add(int(tokenizer.eos_token_id))
    return frozenset(found)


def load_tokenizer(name: str) -> tuple[PreTrainedTokenizerBase, frozenset[int]]:
    """A target's tokenizer and the token ids that end its turns, without its weights. Raises TargetError."""
    where = _where(name)
    with _told(name, "has no tokenizer that can be loaded"):
        tokenizer = AutoTokenizer.from_pretrained(**where)
    generation = None
    with suppress(OSError, ValueError, TypeError, AttributeError):
        generation = GenerationConfig.from_pretrained(name) if "gguf_file" not in where else None
    return tokenizer, _end_ids(tokenizer, generation)


def _from_pretrained(section: TargetSection, where: dict[str, Any]) -> Any:
    """The model; raises TargetError where tensors are missing, which the library would fill with random numbers."""
    how: dict[str, Any] = {**where, "dtype": DTYPES[section.dtype], "output_loading_info": True}
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(**how)
    except ValueError as error:
        if "Unrecognized configuration class" not in str(error):
            raise
        # A wrapper for pictures and text, of which the text part is drafted for.
        loaded = AutoModelForImageTextToText.from_pretrained(**how)
    model, info = loaded
    missing = sorted(info["missing_keys"])
    # Wrappers say it themselves, others in their text part.
    ties = getattr(model.config.get_text_config(), "tie_word_embeddings", False) or model.config.tie_word_embeddings
    tied = set(getattr(model, "_tied_weights_keys", None) or ()) if ties else set()
    missing = [key for key in missing if key not in tied]
    if missing or info["mismatched_keys"]:
        raise TargetError(
            f"target.model '{section.model}' is not complete: missing {missing[:5] or 'none'}, of another shape "
            f"{sorted(map(str, info['mismatched_keys']))[:5] or 'none'}; download it again, or give the right folder"
        )
    return model


def _where(name: str) -> dict[str, Any]:
    """How transformers is told to find a folder, a hub id or a GGUF file. Raises TargetError for what cannot be there."""
    path = Path(name)
    if path.suffix == ".gguf":
        if not path.is_file():
            raise TargetError(f"target.model '{name}' does not exist; give an existing .gguf file")
        return {"pretrained_model_name_or_path": str(path.parent), "gguf_file": path.name}
    if path.is_dir() and not (path / "config.json").is_file():
        raise TargetError(f"target.model '{name}' is a folder without config.json; give a Hugging Face model folder")
    if not path.exists() and (path.is_absolute() or name.startswith(".") or name.count("/") > 1):
        raise TargetError(f"target.model '{name}' does not exist; give a model folder, a hub id or a .gguf file")
    return {"pretrained_model_name_or_path": name}


@contextmanager
def _told(name: str, fault: str) -> Iterator[None]:
    """Whatever the library raises becomes one line that names the target."""
    try:
        yield
    except (OSError, ValueError, KeyError, ImportError, RuntimeError, TypeError, AttributeError, SafetensorError) as error:
        raise TargetError(f"target.model '{name}' {fault}: {' '.join(str(error).split())[:300]}") from error


def load_target(section: TargetSection, devices: list[torch.device]) -> list[Target]:
    """One replica per device; replicas on the same device share weights. Raises TargetError."""
    where = _where(section.model)
    # Its bar would tear the run's own progress line.
    disable_progress_bar()
    replicas: dict[torch.device, Target] = {}
    loaded = []
    with _told(section.model, "cannot be loaded as a causal language model"):
        tokenizer = AutoTokenizer.from_pretrained(**where)
        for device in devices:
            known = replicas.get(device)
            model = share_weights(known.model) if known else _from_pretrained(section, where)
            replica = _wrap(section.model, model, tokenizer, device, section.blocks)
            replicas.setdefault(device, replica)
            loaded.append(replica)
    return loaded


def choose_mask_token(tokenizer: PreTrainedTokenizerBase, vocab_size: int, configured: int | None) -> tuple[int, str]:
    """The id that fills undrafted slots, and how it was chosen. The choice is stored in the checkpoint.

    Order: the configured id; the tokenizer's mask token; the first embedding row past the tokenizer (padded
    vocabularies have some); else TargetError, since an id that text uses would blur meaning.
    """
    if configured is not None:
        if not 0 <= configured < vocab_size:
            raise TargetError(
                f"draft.mask_token_id is {configured}, outside the target's {vocab_size} embedding rows; choose 0..{vocab_size - 1}"
            )
        return configured, "configured"
    if tokenizer.mask_token_id is not None and int(tokenizer.mask_token_id) < vocab_size:
        return int(tokenizer.mask_token_id), f"the tokenizer's mask token {tokenizer.mask_token}"
    # Not len(tokenizer): ids may have holes.
    unused = max(tokenizer.get_vocab().values()) + 1
    if unused < vocab_size:
        return unused, f"first of {vocab_size - unused} embedding rows the tokenizer never uses"
    spare = [f"{t} = {tokenizer.convert_tokens_to_ids(t)}" for t in tokenizer.all_special_tokens]
    raise TargetError(
        f"tokenizer '{tokenizer.name_or_path}' has no mask token and all {vocab_size} embedding rows are in use; set "
        f"draft.mask_token_id to a token the text never contains (special tokens: {', '.join(spare) or 'none'})"
    )
