"""Targets from folders and GGUF files, and the choice of a mask token."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from draftsmith.config import TargetSection
from draftsmith.errors import TargetError
from draftsmith.target.load import choose_mask_token, load_target
from tests.conftest import byte_tokenizer, load_fp32, save_target

CPU = [torch.device("cpu")]


def test_replicas_on_one_device_share_weights(target_folder: Path) -> None:
    one, two = load_target(TargetSection(model=str(target_folder), dtype="fp32"), CPU * 2)
    assert one.model is not two.model
    assert one.embedding.data_ptr() == two.embedding.data_ptr()
    assert one.head.data_ptr() == one.embedding.data_ptr(), "tied"
    assert not any(p.requires_grad for p in two.model.parameters())
    assert one.end_ids == {one.tokenizer.eos_token_id}


def test_dtype_is_honoured(target_folder: Path) -> None:
    (target,) = load_target(TargetSection(model=str(target_folder), dtype="bf16"), CPU)
    assert target.embedding.dtype is torch.bfloat16


def write_gguf(path: Path) -> None:
    """A tiny random Llama in GGUF, written by the format's own library."""
    writer = gguf.GGUFWriter(str(path), "llama")
    writer.add_context_length(256)
    writer.add_embedding_length(32)
    writer.add_block_count(6)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_rope_dimension_count(8)
    writer.add_rope_freq_base(10000.0)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_vocab_size(260)
    vocab = byte_tokenizer(mask=False).get_vocab()
    tokens = sorted(vocab, key=vocab.__getitem__)
    tokens += [f"<|extra{i}|>" for i in range(260 - len(tokens))]
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([1] * 256 + [3] * 4)
    writer.add_token_scores([0.0] * 260)
    writer.add_token_merges([])
    writer.add_eos_token_id(256)
    writer.add_bos_token_id(257)
    rng = np.random.default_rng(0)

    def tensor(name: str, *shape: int) -> None:
        writer.add_tensor(name, (rng.standard_normal(shape) * 0.2).astype(np.float32))

    tensor("token_embd.weight", 260, 32)
    tensor("output.weight", 260, 32)
    tensor("output_norm.weight", 32)
    for n in range(6):
        for part, shape in {
            "attn_norm": (32,),
            "ffn_norm": (32,),
            "attn_q": (32, 32),
            "attn_k": (16, 32),
            "attn_v": (16, 32),
            "attn_output": (32, 32),
            "ffn_gate": (64, 32),
            "ffn_up": (64, 32),
            "ffn_down": (32, 64),
        }.items():
            tensor(f"blk.{n}.{part}.weight", *shape)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_a_gguf_file_is_a_target(tmp_path: Path) -> None:
    write_gguf(tmp_path / "tiny.gguf")
    target = load_fp32(tmp_path / "tiny.gguf")
    assert (target.num_layers, target.hidden_size, target.vocab_size) == (6, 32, 260)
    ids = target.tokenizer("count", add_special_tokens=False)["input_ids"]
    assert len(ids) == 5
    assert target.model(torch.tensor([ids])).logits.isfinite().all()


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("/no/such/folder", "does not exist"),
        ("./missing", "does not exist"),
        ("missing.gguf", "give an existing .gguf file"),
    ],
)
def test_what_is_not_there_is_named(name: str, words: str) -> None:
    with pytest.raises(TargetError, match=words):
        load_target(TargetSection(model=name), CPU)


def test_a_folder_without_a_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(TargetError, match=r"without config\.json"):
        load_target(TargetSection(model=str(tmp_path)), CPU)
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(TargetError, match="cannot be loaded"):
        load_target(TargetSection(model=str(tmp_path)), CPU)


def test_report_d_the_mask_token_is_a_documented_choice() -> None:
    with_mask, without = byte_tokenizer(), byte_tokenizer(mask=False)
    assert choose_mask_token(with_mask, 264, 5) == (5, "configured")
    assert choose_mask_token(with_mask, 264, None)[0] == with_mask.mask_token_id
    chosen, how = choose_mask_token(without, 264, None)
    assert chosen == len(without) == 258
    assert "never uses" in how
    with pytest.raises(TargetError, match="set draft.mask_token_id"):
        choose_mask_token(without, 258, None)


def test_report_c_a_mask_token_outside_the_vocabulary_is_refused() -> None:
    for bad in (264, -1):
        with pytest.raises(TargetError, match=f"draft.mask_token_id is {bad}"):
            choose_mask_token(byte_tokenizer(), 264, bad)


def test_an_incomplete_target_is_refused_rather_than_filled_with_random_numbers(tmp_path: Path) -> None:
    folder = save_target(tmp_path / "t")
    tensors = load_file(folder / "model.safetensors")
    del tensors["model.layers.3.mlp.up_proj.weight"]
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TargetError, match=r"not complete: missing \['model.layers.3.mlp.up_proj.weight'\]"):
        load_target(TargetSection(model=str(folder), dtype="fp32"), CPU)
    (folder / "model.safetensors").write_bytes(b"short")
    with pytest.raises(TargetError, match="cannot be loaded"):
        load_target(TargetSection(model=str(folder), dtype="fp32"), CPU)


def test_an_unused_row_is_past_the_largest_id_even_where_ids_have_holes() -> None:
    tokenizer = byte_tokenizer(mask=False)

    class Holes:
        mask_token_id = None

        def get_vocab(self) -> dict[str, int]:
            return {"a": 0, "b": 5}

        def __len__(self) -> int:
            return 2

    assert choose_mask_token(Holes(), 264, None)[0] == 6  # type: ignore[arg-type]
    assert choose_mask_token(tokenizer, 264, None)[0] == 258
