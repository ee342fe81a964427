"""Each family that is supported, as a tiny random model: states, ends and decoding equal to the library's own; others are refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from draftsmith.build.plan import drafter_config
from draftsmith.config import DraftSection, TargetSection
from draftsmith.decode.speculate import Speculator, decode_plain
from draftsmith.draft.model import Drafter
from draftsmith.errors import TargetError
from draftsmith.target.capture import Capture
from draftsmith.target.load import Target, load_target
from tests.conftest import byte_tokenizer
from tests.target.test_capture import library_states, pack_of

BASE = {
    "vocab_size": 264,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "eos_token_id": 256,
    "bos_token_id": 1,
}
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16}
LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 8}
ROPE = {"rope_type": "default", "rope_theta": 10000.0}
FAMILIES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen3 tied": {"tie_word_embeddings": True},
    "qwen3 padded vocabulary": {"vocab_size": 320},
    "qwen3_moe": {"num_experts": 4, "decoder_sparse_step": 1, **EXPERTS},
    "qwen3_5_text": LINEAR,
    "llama": {},
    "gemma": {},
    "gemma2": {"sliding_window": 8, "final_logit_softcapping": 5.0},
    "gemma3_text": {"sliding_window": 8},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 8, "rope_parameters": ROPE},
    "glm4": {},
    "glm4_moe": {"n_routed_experts": 4, "first_k_dense_replace": 1, **EXPERTS},
}


def save(folder: Path, name: str, **more: Any) -> Path:
    torch.manual_seed(0)
    config = AutoConfig.for_model(name.split()[0], **{**BASE, **FAMILIES.get(name, {}), **more})
    model = AutoModelForCausalLM.from_config(config)
    model.generation_config.eos_token_id = 256
    model.save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.fixture(scope="module", params=list(FAMILIES))
def family(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Target:
    folder = save(tmp_path_factory.mktemp("family") / "target", request.param)
    return load_target(TargetSection(model=str(folder), dtype="fp32"), [torch.device("cpu")])[0]


def test_states_are_bit_equal_to_the_librarys(family: Target) -> None:
    tokens = pack_of(29)
    layers = (1, 2, 4)
    assert torch.equal(Capture(family, layers)(tokens).features, library_states(family, tokens.ids[None], layers)[0])


def test_states_do_not_depend_on_neighbours(family: Target) -> None:
    tokens = pack_of(7, 19, 12, padding=4)
    got, start = Capture(family, (1, 3))(tokens).features, 0
    for length in tokens.lengths:
        alone = library_states(family, tokens.ids[None, start : start + length], (1, 3))[0]
        torch.testing.assert_close(got[start : start + length], alone, rtol=1e-4, atol=1e-5)
        start += length


@torch.no_grad()
def test_both_ends_are_those_of_the_family(family: Target) -> None:
    ids, entered = torch.arange(5, 40)[None], []
    hook = family.blocks[0].register_forward_pre_hook(
        lambda _m, args, kw: entered.append(args[0] if args else kw["hidden_states"]), with_kwargs=True
    )
    logits = family.model(ids).logits
    hook.remove()
    assert torch.equal(family.ends.embed(ids), entered[0])
    torch.testing.assert_close(family.ends.logits(family.decoder(ids).last_hidden_state), logits, rtol=1e-5, atol=1e-5)


def test_the_drafter_turns_its_positions_as_the_targets_full_layers_do(family: Target) -> None:
    config, _ = drafter_config(DraftSection(mask_token_id=250), family)
    rope = family.text_config().rope_parameters
    assert config.rope_theta == rope.get("full_attention", rope)["rope_theta"]


def test_decoding_is_identical_to_the_librarys_greedy_generate(family: Target) -> None:
    config, _ = drafter_config(DraftSection(layers=1, block_size=4, target_layers=2, mask_token_id=250), family)
    drafter = Drafter(config).initialise(torch.Generator().manual_seed(0))
    speculator = Speculator(family, drafter)
    for prompt in ([1, 5, 9, 30, 31, 32, 200], list(range(40, 62)), [7]):
        ids = torch.tensor([prompt])
        out = family.model.generate(  # type: ignore[operator]
            ids, attention_mask=torch.ones_like(ids), max_new_tokens=24, do_sample=False, eos_token_id=256, pad_token_id=0
        )
        expected = out[0, len(prompt) :].tolist()
        assert decode_plain(family, prompt, 24).ids == expected
        assert speculator.decode(prompt, 24).ids == expected


@pytest.mark.parametrize(
    ("name", "more", "what"),
    [
        ("granite", {"embedding_multiplier": 3.0}, "embedded tokens are"),
        ("granite", {"logits_scaling": 7.0}, "logits are"),
        (
            "gpt2",
            {"n_embd": 32, "n_layer": 4, "n_head": 4, "n_positions": 128},
            r"no list 'layers'.*set target.blocks.*transformer.h \(6 of",
        ),
        ("cohere", {"logit_scale": 0.1}, "logits are"),
    ],
)
def test_a_family_that_does_more_is_refused_with_what_is_missing(
    tmp_path: Path, name: str, more: dict[str, Any], what: str
) -> None:
    folder = save(tmp_path / "t", name, **more)
    with pytest.raises(TargetError, match=what):
        load_target(TargetSection(model=str(folder), dtype="fp32"), [torch.device("cpu")])


def load(folder: Path, blocks: str | None = None) -> Target:
    return load_target(TargetSection(model=str(folder), dtype="fp32", blocks=blocks), [torch.device("cpu")])[0]


def test_blocks_that_lie_elsewhere_can_be_named(tmp_path: Path) -> None:
    """GPT-J has them at transformer.h, and otherwise does nothing that a drafter would have to know of."""
    sizes = {"n_embd": 32, "n_layer": 6, "n_head": 4, "rotary_dim": 8, "n_positions": 128, "n_inner": 64}
    folder = save(tmp_path / "gptj", "gptj", **sizes)
    with pytest.raises(TargetError, match=r"set target.blocks .* transformer.h \(6 of GPTJBlock\)"):
        load(folder)
    with pytest.raises(TargetError, match=r"target.blocks is 'transformer.x', which is no list of blocks"):
        load(folder, "transformer.x")
    target = load(folder, "transformer.h")
    tokens = pack_of(21)
    assert torch.equal(Capture(target, (1, 2, 4))(tokens).features, library_states(target, tokens.ids[None], (1, 2, 4))[0])
    assert len(target.blocks) == target.num_layers == 6


PICTURES = {
    "gemma3": {
        "vision_config": {
            "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28, "patch_size": 14,
        },
        "text_config": {**BASE, "sliding_window": 8},
    },
    "qwen3_vl": {
        "vision_config": {
            "hidden_size": 16, "intermediate_size": 16, "depth": 1, "num_heads": 2, "out_hidden_size": 32, "deepstack_visual_indexes": [0],
        },
        "text_config": {
            **BASE, "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 1, 1]},
        },
    },
}  # fmt: skip


@pytest.mark.parametrize("name", list(PICTURES))
def test_the_text_part_of_a_wrapper_is_a_target(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    model = AutoModelForImageTextToText.from_config(AutoConfig.for_model(name, **PICTURES[name]))
    model.generation_config.eos_token_id = 256
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    target = load(tmp_path)
    tokens = pack_of(19)
    assert target.num_layers == 6
    assert torch.equal(Capture(target, (1, 2, 4))(tokens).features, library_states(target, tokens.ids[None], (1, 2, 4))[0])
    config, _ = drafter_config(DraftSection(layers=1, block_size=4, target_layers=2, mask_token_id=250), target)
    speculator = Speculator(target, Drafter(config).initialise(torch.Generator().manual_seed(0)))
    ids = torch.tensor([list(range(40, 62))])
    out = target.model.generate(  # type: ignore[operator]
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False, eos_token_id=256, pad_token_id=0
    )
    assert speculator.decode(ids[0].tolist(), 16).ids == decode_plain(target, ids[0].tolist(), 16).ids == out[0, 22:].tolist()
