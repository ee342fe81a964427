"""Hidden states that a vLLM server extracts: its files as they lie in a folder, or asked for over HTTP document by document.

The layout is that of vLLM's hidden-state extraction: one safetensors file a request with `hidden_states` [T, m, D] and `token_ids` [T],
and, while it is being written, a `.lock` beside it that the writer holds. vLLM numbers hidden states, so its layer id j + 1 is the
output of block j; started for speculators it appends the last layer, which is not needed here.
"""

import asyncio
import fcntl
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor

from draftsmith.errors import CaptureError
from draftsmith.target.asking import FIRST_WAIT_S, NoAnswer, ask, told
from draftsmith.target.cache import digest, parts
from draftsmith.types import HiddenStates, Tokens


class StateFiles:
    """Reads files of that layout and lays documents out as the pack needs them. device: of what it makes, the host."""

    def __init__(self, layer_ids: Sequence[int], width: int, dtype: torch.dtype) -> None:
        self.device, self.dtype = torch.device("cpu"), dtype
        self.layer_ids, self.width = tuple(layer_ids), width

    def lay_out(self, tokens: Tokens, files: Sequence[Path]) -> HiddenStates:
        """The states of a pack whose documents lie in these files, in order. Raises CaptureError."""
        features = torch.zeros(tokens.bucket, len(self.layer_ids) * self.width, dtype=self.dtype)
        for part, path, name in zip(parts(tokens), files, tokens.names, strict=True):
            features[part] = self.read(path, tokens.ids[part], name)
        return HiddenStates(features)

    def read(self, path: Path, ids: Tensor, name: str) -> Tensor:
        """States [T, n*D] of one document. Raises CaptureError naming file and document."""
        place = f"hidden states of {name} in '{path}'"
        try:
            _await_writer(path)
            held = load_file(path)
            states, found = held["hidden_states"], held["token_ids"]
        except KeyError as error:
            raise CaptureError(
                f"{place}: no tensor {error}; expected 'hidden_states' and 'token_ids', as vLLM writes them"
            ) from None
        except (OSError, SafetensorError) as error:
            raise CaptureError(
                f"{place} cannot be read ({' '.join(str(error).split())[:200]}); have the server write it again"
            ) from None
        if found.tolist() != ids.tolist():
            raise CaptureError(
                f"{place}: they belong to other tokens ({found.numel()}, expected {ids.numel()}); the server must be given the token ids as they are"
            )
        wanted = [layer_id + 1 for layer_id in self.layer_ids]
        if states.dim() != 3 or states.shape[0] != ids.numel() or states.shape[2] != self.width:
            raise CaptureError(f"{place}: shape {list(states.shape)}, expected [{ids.numel()}, {len(wanted)}, {self.width}]")
        if states.shape[1] not in (len(wanted), len(wanted) + 1):
            raise CaptureError(
                f"{place}: {states.shape[1]} layers, expected {len(wanted)} (and perhaps the last one after them); start the server with "
                f'"eagle_aux_hidden_state_layer_ids": {wanted}'
            )
        states = states[:, : len(wanted)].to(self.dtype)
        if not bool(states.isfinite().all()):
            raise CaptureError(f"{place}: they are not finite; a state is NaN or infinite, so look at the server's log")
        return states.flatten(1)


def _await_writer(path: Path) -> None:
    """Sleep until whoever writes the file has let go of its lock."""
    try:
        lock = os.open(f"{path}.lock", os.O_RDONLY)
    except FileNotFoundError:
        return
    try:
        fcntl.flock(lock, fcntl.LOCK_SH)
    finally:
        os.close(lock)


class StatesFromFiles:
    """A source that finds each document among the files of a folder by its tokens."""

    def __init__(self, folder: Path, reader: StateFiles) -> None:
        self.device, self.dtype, self._reader, self._folder = reader.device, reader.dtype, reader, folder
        self._files: dict[str, Path] = {}
        for path in sorted(folder.rglob("*.safetensors")):
            try:
                _await_writer(path)
                with safe_open(path, framework="pt") as file:
                    self._files[digest(file.get_tensor("token_ids").long())] = path
            except (OSError, SafetensorError) as error:
                raise CaptureError(
                    f"'{path}' is not a file of hidden states as vLLM writes them ({' '.join(str(error).split())[:200]}); remove it, or have "
                    "the server write it again"
                ) from None

    def check_complete(self, packs: Sequence[Tokens]) -> None:
        """Raise CaptureError unless every document has a file."""
        lacking = [
            name
            for tokens in packs
            for part, name in zip(parts(tokens), tokens.names, strict=True)
            if digest(tokens.ids[part]) not in self._files
        ]
        if lacking:
            raise CaptureError(
                f"hidden_states.folder '{self._folder}' lacks {len(lacking)} documents, the first of them {lacking[0]}; have the server write "
                "states for the very token ids of the training data, or use hidden_states.source=server"
            )

    def __call__(self, tokens: Tokens) -> HiddenStates:
        """Features [S, n*D] of one pack."""
        return self._reader.lay_out(tokens, [self._files[digest(tokens.ids[part])] for part in parts(tokens)])


def _passes(status: int) -> bool:
    return status >= 500 or status in (408, 429)


class StatesFromServer:
    """A source that has a vLLM server run each document, and reads and removes the file that it names.

    url: up to and including /v1; folder: where the server's files lie on this machine, if not where the server says.
    """

    def __init__(
        self, url: str, model: str, folder: Path | None, reader: StateFiles, *, first_wait_s: float = FIRST_WAIT_S
    ) -> None:
        self.device, self.dtype, self._reader, self._folder = reader.device, reader.dtype, reader, folder
        self._url, self._model, self._first_wait_s = url.rstrip("/"), model, first_wait_s

    def __call__(self, tokens: Tokens) -> HiddenStates:
        """Features [S, n*D] of one pack; its documents are asked for all at once."""
        files = asyncio.run(self._ask_for(tokens))
        hidden = self._reader.lay_out(tokens, files)
        # Only now, when they have proved to be states of these very tokens: a server may name any file.
        for path in files:
            path.unlink(missing_ok=True)
            Path(f"{path}.lock").unlink(missing_ok=True)
        return hidden

    async def _ask_for(self, tokens: Tokens) -> list[Path]:
        async with httpx.AsyncClient(timeout=600.0, trust_env=False) as client:
            return await asyncio.gather(*(self._path(client, tokens.ids[part].tolist()) for part in parts(tokens)))

    async def _path(self, client: httpx.AsyncClient, ids: list[int]) -> Path:
        body = json.dumps({"model": self._model, "prompt": ids, "max_tokens": 1}).encode()
        try:
            answer = await ask(client, f"{self._url}/completions", body, passes=_passes, first_wait_s=self._first_wait_s)
            if answer.status_code != 200:
                raise NoAnswer(told(answer))
        except NoAnswer as error:
            raise CaptureError(
                f"hidden_states.url '{self._url}' gives no states ({error}); see that the server runs and serves '{self._model}', then resume"
            ) from None
        return self._named(answer)

    def _named(self, answer: httpx.Response) -> Path:
        try:
            told: Any = answer.json()["kv_transfer_params"]["hidden_states_path"]
            path = Path(str(told))
        except (ValueError, LookupError, TypeError) as error:
            raise CaptureError(
                f"hidden_states.url '{self._url}' names no file of hidden states ({type(error).__name__}: {error}); start vLLM with the "
                "speculative method extract_hidden_states and a connector that writes them"
            ) from None
        return path if self._folder is None else self._folder / path.name
