"""The configuration is strict and says what is wrong, where, and how to mend it."""

from pathlib import Path

import pytest
import yaml

from draftsmith.config import load_config, parse_config
from draftsmith.errors import ConfigError

MINIMAL = {"target": {"model": "m"}, "data": {"train": ["d.jsonl"]}}


def write(path: Path, tree: object) -> Path:
    path.write_text(yaml.safe_dump(tree))
    return path


def test_defaults_are_the_papers_recipe() -> None:
    config = parse_config(MINIMAL, "x")
    assert (config.draft.layers, config.draft.block_size, config.draft.target_layers) == (5, 16, 5)
    assert (config.train.anchors, config.train.lr, config.train.warmup, config.train.clip) == (512, 6e-4, 0.04, 1.0)
    assert (config.train.epochs, config.data.longest, config.train.precision) == (6.0, 3072, "bf16")


EXAMPLES = sorted((Path(__file__).parents[1] / "examples").glob("*.yaml"))


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda p: p.name)
def test_examples_are_valid(path: Path) -> None:
    assert load_config(path).target.model


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 2


def test_overrides_take_yaml_values_and_leave_the_tree_alone(tmp_path: Path) -> None:
    path = write(tmp_path / "c.yaml", MINIMAL)
    config = load_config(
        path, ["train.lr=1e-4", "draft.target_layer_ids=[1, 2]", "run.dir=somewhere", "draft.mask_token_id=null"]
    )
    assert config.train.lr == 1e-4
    assert config.draft.target_layer_ids == [1, 2]
    assert config.run.dir == "somewhere"
    assert load_config(path).train.lr == 6e-4


@pytest.mark.parametrize(
    ("key", "near"),
    [
        ("train.learning_rat", "train."),
        ("train.packs_per_stp", "train.packs_per_step"),
        ("draft.blocksize", "draft.block_size"),
        ("trian.lr", "train"),
        ("data.lr", "train.lr"),
    ],
)
def test_an_unknown_key_suggests_the_nearest(tmp_path: Path, key: str, near: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path / "c.yaml", MINIMAL), [f"{key}=1"])
    assert "unknown key" in str(caught.value)
    assert f"did you mean '{near}" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_every_problem_is_named_at_once(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(write(tmp_path / "c.yaml", {"target": {"model": "m", "dtype": "fp8"}, "train": {"anchors": 0}}))
    for word in ("'data' is required", "target.dtype", "fp8", "train.anchors"):
        assert word in str(caught.value)


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.lr", "not of the form"),
        ("lr=1", "not of the form"),
        ("train.lr.x=1", "not of the form"),
        ("train.lr=[", "not YAML"),
        ("data.buckets=[]", "data.buckets is empty"),
        ("draft.block_size=4000", "larger than the smallest of data.buckets, 3072"),
        ("train.packs_per_step=7", "cannot be shared evenly by 2 drafter replicas"),
        ("draft.attention=flex", "no backward on CPU"),
        ("draft.block_size=1", "greater than or equal to 2"),
    ],
)
def test_contradictions_are_refused(tmp_path: Path, override: str, words: str) -> None:
    path = write(tmp_path / "c.yaml", MINIMAL | {"train": {"devices": ["cpu", "cpu"]}})
    with pytest.raises(ConfigError, match=words.replace(".", r"\.")):
        load_config(path, [override])


def test_flex_attention_without_compilation_is_refused(tmp_path: Path) -> None:
    """Called eagerly it would compile by itself, in whichever thread, outside the gate."""
    path = write(tmp_path / "c.yaml", MINIMAL | {"train": {"devices": ["cuda:0"]}})
    with pytest.raises(ConfigError, match=r"'flex' works only compiled but compile\.enabled is false"):
        load_config(path, ["draft.attention=flex", "compile.enabled=false"])
    assert load_config(path, ["draft.attention=flex"]).draft.attention == "flex"


@pytest.mark.parametrize(
    ("text", "words"),
    [("- a\n- b", "expected sections"), ("a: [", "is not YAML"), ("", "expected sections"), ("train: 5", "train")],
)
def test_files_that_are_not_configs(tmp_path: Path, text: str, words: str) -> None:
    (tmp_path / "c.yaml").write_text(text)
    with pytest.raises(ConfigError, match=words):
        load_config(tmp_path / "c.yaml")
    with pytest.raises(ConfigError, match="does not exist"):
        load_config(tmp_path / "none.yaml")
