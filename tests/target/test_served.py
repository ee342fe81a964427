"""Hidden states in the layout of vLLM's extraction: from a folder, and from a server that writes them on request."""

import fcntl
import json
import os
import signal
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from draftsmith.build import run as building
from draftsmith.config import Config, parse_config
from draftsmith.data.packing import pack
from draftsmith.errors import CaptureError, ConfigError, PipelineError
from draftsmith.pipeline import coordinator as coordinating
from draftsmith.target import asking, served
from draftsmith.target.capture import Capture
from draftsmith.target.load import Target
from draftsmith.target.served import StateFiles, StatesFromFiles, StatesFromServer
from draftsmith.types import Tokens
from tests.conftest import load_fp32, small_tree, write_chats
from tests.pipeline.test_run import final_digest, metrics, quiet
from tests.target.test_cache import some_documents
from tests.target.test_capture import library_states

LAYERS = (1, 2, 3)


def write_states(path: Path, target: Target, ids: list[int], *, last: bool = False) -> None:
    """One file as vLLM's connector writes it: a layer's state for each token, in the order of the layer ids."""
    tokens = torch.tensor([ids])
    layers = [library_states(target, tokens, (j,))[0] for j in LAYERS + ((5,) if last else ())]
    save_file({"hidden_states": torch.stack(layers, dim=1), "token_ids": torch.tensor(ids)}, path)


def packs_of(count: int = 6) -> list[Tokens]:
    return pack(some_documents(count), [128], seed=0)[0]


def documents_of(packs: list[Tokens]) -> list[list[int]]:
    return [tokens.ids[part].tolist() for tokens in packs for part in served.parts(tokens)]


@pytest.fixture
def reader(target: Target) -> StateFiles:
    return StateFiles(LAYERS, target.hidden_size, torch.float32)


@pytest.mark.parametrize("last", [False, True])
def test_files_give_what_live_capture_gives(tmp_path: Path, target: Target, reader: StateFiles, last: bool) -> None:
    packs = packs_of()
    for number, ids in enumerate(documents_of(packs)):
        write_states(tmp_path / f"hs_{number}.safetensors", target, ids, last=last)
    source, capture = StatesFromFiles(tmp_path, reader), Capture(target, LAYERS)
    source.check_complete(packs)
    for tokens in packs:
        got, live = source(tokens).features, capture(tokens).features
        torch.testing.assert_close(got, live, rtol=1e-4, atol=1e-5)
        assert not got[sum(tokens.lengths) :].any()


def test_a_document_without_a_file_is_named(tmp_path: Path, target: Target, reader: StateFiles) -> None:
    packs = packs_of()
    for number, ids in enumerate(documents_of(packs)[1:]):
        write_states(tmp_path / f"hs_{number}.safetensors", target, ids)
    with pytest.raises(CaptureError, match=r"lacks \d documents, the first of them chats.jsonl:\d+; have the server write"):
        StatesFromFiles(tmp_path, reader).check_complete(packs)


def change(held: dict[str, torch.Tensor], **tensors: torch.Tensor) -> dict[str, torch.Tensor]:
    return {name: tensor.contiguous() for name, tensor in {**held, **tensors}.items()}


FAULTS: list[tuple[Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]], str]] = [
    (lambda held: {"hidden_states": held["hidden_states"]}, "no tensor 'token_ids'"),
    (lambda held: change(held, token_ids=held["token_ids"] + 1), "they belong to other tokens"),
    (lambda held: change(held, hidden_states=held["hidden_states"][:-1]), r"shape \[4, 3, 32\], expected \[5, 3, 32\]"),
    (lambda held: change(held, hidden_states=held["hidden_states"][..., :16]), r"shape \[5, 3, 16\]"),
    (lambda held: change(held, hidden_states=held["hidden_states"][:, :2]), r"2 layers, expected 3 .*layer_ids\": \[2, 3, 4\]"),
    (lambda held: change(held, hidden_states=held["hidden_states"] * float("nan")), "not finite"),
]


@pytest.mark.parametrize(("fault", "words"), FAULTS)
def test_each_fault_of_a_file_is_named(
    tmp_path: Path,
    target: Target,
    reader: StateFiles,
    fault: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]],
    words: str,
) -> None:
    from safetensors.torch import load_file

    ids = [5, 6, 7, 8, 9]
    write_states(tmp_path / "good.safetensors", target, ids)
    save_file(fault(load_file(tmp_path / "good.safetensors")), tmp_path / "bad.safetensors")
    with pytest.raises(CaptureError, match=words) as caught:
        reader.read(tmp_path / "bad.safetensors", torch.tensor(ids), "chats.jsonl:7")
    assert "chats.jsonl:7" in str(caught.value)


def test_half_a_file_is_refused_by_name(tmp_path: Path, target: Target, reader: StateFiles) -> None:
    write_states(tmp_path / "hs.safetensors", target, [1, 2, 3])
    raw = (tmp_path / "hs.safetensors").read_bytes()
    (tmp_path / "hs.safetensors").write_bytes(raw[: len(raw) // 2])
    with pytest.raises(CaptureError, match="hs.safetensors' is not a file of hidden states"):
        StatesFromFiles(tmp_path, reader)


class Server(BaseHTTPRequestHandler):
    """Stands for vLLM: runs the prompt, names a file, and writes it while it holds the lock beside it."""

    target: Target
    folder: Path
    trouble: int
    answer: dict[str, Any] | None
    names: list[str]
    lock = threading.Lock()

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        kind = type(self)
        with kind.lock:
            kind.trouble -= 1
            if kind.trouble >= 0:
                self.send_response(503)
                self.end_headers()
                return
            path = kind.folder / f"req-{len(kind.names)}.safetensors"
            kind.names.append(path.name)
        assert body["max_tokens"] == 1
        assert body["model"] == "served"
        lock = os.open(f"{path}.lock", os.O_CREAT | os.O_WRONLY)
        fcntl.flock(lock, fcntl.LOCK_EX)
        told = kind.answer if kind.answer is not None else {"kv_transfer_params": {"hidden_states_path": f"/there/{path.name}"}}
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"choices": [], **told}).encode())
        self.wfile.flush()
        with kind.lock:
            write_states(path, kind.target, body["prompt"], last=True)
        os.close(lock)

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def server(tmp_path: Path, target_folder: Path) -> Iterator[tuple[type[Server], str]]:
    kind = type("Scripted", (Server,), {})
    kind.target, kind.folder = load_fp32(target_folder), tmp_path / "shared"  # type: ignore[attr-defined]
    kind.trouble, kind.answer, kind.names = 0, None, []  # type: ignore[attr-defined]
    (tmp_path / "shared").mkdir()
    running = ThreadingHTTPServer(("127.0.0.1", 0), kind)
    thread = threading.Thread(target=running.serve_forever, daemon=True)
    thread.start()
    yield kind, f"http://127.0.0.1:{running.server_address[1]}/v1"
    running.shutdown()
    running.server_close()


def test_a_server_gives_what_live_capture_gives_and_its_files_are_removed(
    tmp_path: Path, target: Target, reader: StateFiles, server: tuple[type[Server], str]
) -> None:
    kind, url = server
    kind.trouble = 2
    source = StatesFromServer(url, "served", tmp_path / "shared", reader, first_wait_s=0.0)
    capture = Capture(target, LAYERS)
    for tokens in packs_of():
        torch.testing.assert_close(source(tokens).features, capture(tokens).features, rtol=1e-4, atol=1e-5)
    assert len(kind.names) == 7
    assert list((tmp_path / "shared").iterdir()) == []


def test_a_server_that_names_a_strangers_file_does_not_have_it_removed(
    tmp_path: Path, reader: StateFiles, server: tuple[type[Server], str]
) -> None:
    kind, url = server
    (tmp_path / "precious.safetensors").write_text("mine")
    kind.answer = {"kv_transfer_params": {"hidden_states_path": str(tmp_path / "precious.safetensors")}}
    with pytest.raises(CaptureError, match="precious.safetensors' cannot be read"):
        StatesFromServer(url, "served", None, reader, first_wait_s=0.0)(packs_of()[0])
    assert (tmp_path / "precious.safetensors").read_text() == "mine"


@pytest.mark.parametrize(
    ("trouble", "answer", "words"),
    [
        (99, None, "gives no states .status 503"),
        (0, {"kv_transfer_params": None}, "names no file of hidden states.*extract_hidden_states"),
    ],
)
def test_a_server_that_gives_nothing_is_named(
    tmp_path: Path, reader: StateFiles, server: tuple[type[Server], str], trouble: int, answer: Any, words: str
) -> None:
    kind, url = server
    kind.trouble, kind.answer = trouble, answer
    with pytest.raises(CaptureError, match=words):
        StatesFromServer(url, "served", tmp_path / "shared", reader, first_wait_s=0.0)(packs_of()[0])


def with_source(target_folder: Path, tmp_path: Path, run: str, section: dict[str, str], **train: object) -> Config:
    tree = small_tree(target_folder, write_chats(tmp_path / "chats.jsonl"), tmp_path / run)
    tree["hidden_states"] = dict(section)
    tree["train"] |= train
    return parse_config(tree, "test")


def test_a_run_trains_from_a_server_and_from_its_files_as_it_does_live(
    tmp_path: Path, target_folder: Path, server: tuple[type[Server], str]
) -> None:
    kind, url = server
    live = with_source(target_folder, tmp_path, "live", {})
    building.train(live, resume=None, say=quiet)
    shared = {"source": "server", "url": url, "model": "served", "folder": str(tmp_path / "shared")}
    asked = with_source(target_folder, tmp_path, "asked", shared)
    building.train(asked, resume=None, say=quiet)
    packs = building.resolve(live).packs
    for number, ids in enumerate(documents_of(packs)):
        write_states(tmp_path / "shared" / f"kept-{number}.safetensors", kind.target, ids)
    read = with_source(target_folder, tmp_path, "read", {"source": "files", "folder": str(tmp_path / "shared")})
    building.train(read, resume=None, say=quiet)
    for other in (asked, read):
        assert [r["loss"] for r in metrics(other)] == pytest.approx([r["loss"] for r in metrics(live)], rel=1e-3)
    assert final_digest(read) == final_digest(asked)


def test_a_server_that_dies_stops_the_run_by_name(
    tmp_path: Path, target_folder: Path, server: tuple[type[Server], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, url = server
    kind.trouble = 10**6
    monkeypatch.setattr(asking, "TRIES", 1)
    shared = {"source": "server", "url": url, "model": "served", "folder": str(tmp_path / "shared")}
    with pytest.raises(PipelineError, match=r"target-0 failed: CaptureError: hidden_states.url .* gives no states"):
        building.train(with_source(target_folder, tmp_path, "run", shared), resume=None, say=quiet)


def test_a_server_that_hangs_does_not_hold_a_stop(tmp_path: Path, target_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It gives five packs and then nothing: the third step, which lacks one, is given up, and what two steps trained is saved."""
    release, begun, original, calls = threading.Event(), threading.Event(), Capture.__call__, [0]
    let_go = coordinating.Coordinator._release

    def hanging(self: Capture, tokens: Tokens) -> Any:
        calls[0] += 1
        if calls[0] > 5:
            assert begun.wait(30)
            os.kill(os.getpid(), signal.SIGTERM)
            release.wait(60)
        return original(self, tokens)

    def note(self: coordinating.Coordinator, step: int) -> None:
        let_go(self, step)
        if step == 2:
            begun.set()

    monkeypatch.setattr(coordinating.Coordinator, "_release", note)
    monkeypatch.setattr(Capture, "__call__", hanging)
    monkeypatch.setattr(coordinating, "STARVED_S", 0.3)
    monkeypatch.setattr(coordinating, "STOP_SECONDS", 0.5)
    config = with_source(target_folder, tmp_path, "run", {}, max_steps=50)
    outcome = building.train(config, resume=None, say=quiet)
    release.set()
    assert outcome.signal_number == signal.SIGTERM
    assert outcome.step == 2
    assert outcome.stuck == ("target-0",)
    monkeypatch.undo()
    building.train(config, resume="latest", say=quiet)
    straight = with_source(target_folder, tmp_path, "straight", {}, max_steps=50)
    building.train(straight, resume=None, say=quiet)
    assert final_digest(config) == final_digest(straight)


def test_what_cannot_be_is_refused(tmp_path: Path, target_folder: Path) -> None:
    with pytest.raises(ConfigError, match="hidden_states.url or hidden_states.model is not set"):
        with_source(target_folder, tmp_path, "run", {"source": "server"})
    with pytest.raises(ConfigError, match="holds a name or a password"):
        with_source(target_folder, tmp_path, "run", {"source": "server", "url": "http://me:secret@host/v1", "model": "m"})
    with pytest.raises(ConfigError, match=r"train.loss is 'kl'.* does not give them normed"):
        with_source(target_folder, tmp_path, "run", {"source": "files", "folder": "x"}, loss="kl")
