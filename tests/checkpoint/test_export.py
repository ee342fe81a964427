"""Exported folders: whole, strict, in the dtype asked for."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.checkpoint.export import export_drafter, load_drafter
from draftsmith.errors import CheckpointError, UsageError
from tests.conftest import tiny_drafter

CONTRACT = {"fc.weight", "hidden_norm.weight", "norm.weight"} | {
    f"layers.{n}.{part}.weight"
    for n in range(2)
    for part in (
        "input_layernorm",
        "post_attention_layernorm",
        *(f"self_attn.{p}_{kind}" for p, kind in zip("qkvo", ["proj"] * 4, strict=True)),
        "self_attn.q_norm",
        "self_attn.k_norm",
        *(f"mlp.{p}_proj" for p in ("gate", "up", "down")),
    )
}


@pytest.mark.parametrize(("dtype", "kind"), [("fp32", torch.float32), ("bf16", torch.bfloat16)])
def test_dflash_export_has_exactly_the_contracts_tensors(tmp_path: Path, dtype: str, kind: torch.dtype) -> None:
    drafter = tiny_drafter()
    export_drafter(tmp_path / "out", drafter, format="dflash", dtype=dtype)  # type: ignore[arg-type]
    tensors = load_file(tmp_path / "out" / "model.safetensors")
    assert set(tensors) == CONTRACT
    assert {t.dtype for t in tensors.values()} == {kind}
    loaded = load_drafter(tmp_path / "out")
    assert loaded.config == drafter.config
    assert {p.dtype for p in loaded.parameters()} == {torch.float32}
    for name, p in drafter.named_parameters():
        assert torch.equal(dict(loaded.named_parameters())[name], p.to(kind).float())


def test_report_19_a_block_of_eight_drafts_seven(tmp_path: Path) -> None:
    export_drafter(
        tmp_path / "out",
        tiny_drafter(block_size=8),
        format="speculators",
        dtype="fp32",
        target="some/target",
        target_architectures=["Qwen3ForCausalLM"],
        embedding=torch.zeros(264, 32),
    )
    tree = json.loads((tmp_path / "out" / "config.json").read_text())
    assert tree["block_size"] == 8
    assert tree["speculators_config"]["proposal_methods"][0]["speculative_tokens"] == 7
    assert tree["aux_hidden_state_layer_ids"] == [2, 3, 4]
    assert set(load_file(tmp_path / "out" / "model.safetensors")) == CONTRACT | {"embed_tokens.weight"}


def test_an_existing_folder_is_never_overwritten(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="already exists"):
        export_drafter(tmp_path, tiny_drafter(), format="dflash", dtype="fp32")


def test_speculators_needs_the_target(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="--target"):
        export_drafter(tmp_path / "out", tiny_drafter(), format="speculators", dtype="fp32")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("change", ["missing", "over", "shape", "cut", "pickle"])
def test_the_loader_is_strict(tmp_path: Path, change: str) -> None:
    export_drafter(tmp_path / "out", tiny_drafter(), format="dflash", dtype="fp32")
    path = tmp_path / "out" / "model.safetensors"
    tensors = load_file(path)
    if change == "missing":
        del tensors["layers.1.mlp.up_proj.weight"]
    elif change == "over":
        tensors["lm_head.weight"] = torch.zeros(2)
    elif change == "shape":
        tensors["fc.weight"] = torch.zeros(2, 2)
    save_file(tensors, path)
    if change == "cut":
        path.write_bytes(path.read_bytes()[:-9])
    elif change == "pickle":
        torch.save(tensors, path)
    with pytest.raises(CheckpointError):
        load_drafter(tmp_path / "out")
