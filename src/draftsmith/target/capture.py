"""Tokens to hidden states, with hooks of our own on the blocks asked for.

Not `output_hidden_states`: it collects every layer, and it is not safe while another thread compiles.
"""

import itertools
from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from draftsmith.errors import CaptureError
from draftsmith.target.load import Target, find_blocks, share_weights
from draftsmith.types import HiddenStates, Tokens


class Recorder:
    """Keeps the outputs of chosen blocks during a forward pass; one per module copy, so one thread at a time."""

    def __init__(self, blocks: nn.ModuleList, layer_ids: Sequence[int]) -> None:
        self.layer_ids = tuple(layer_ids)
        self._outputs: dict[int, Tensor] = {}
        for layer_id in self.layer_ids:
            blocks[layer_id].register_forward_hook(self._hook(layer_id))

    def _hook(self, layer_id: int) -> Callable[..., None]:
        def keep(_module: nn.Module, _inputs: object, output: Tensor | tuple[Tensor, ...]) -> None:
            self._outputs[layer_id] = output[0] if isinstance(output, tuple) else output

        return keep

    def take(self, width: int) -> Tensor:
        """The recorded outputs side by side, [B, T, n*D] with D = `width`; forgets them. Raises CaptureError."""
        outputs, self._outputs = self._outputs, {}
        for layer_id in self.layer_ids:
            got = outputs.get(layer_id)
            if got is None or got.shape[-1] != width:
                found = "nothing" if got is None else f"width {got.shape[-1]}"
                raise CaptureError(
                    f"target block {layer_id} gave {found}, expected width {width}; check draft.target_layer_ids"
                )
        return torch.cat([outputs[i] for i in self.layer_ids], dim=-1)


def _groups(lengths: Sequence[int]) -> list[list[int]]:
    """Document numbers in groups of similar length, none under half its group's longest, so padding stays under one half."""
    order = sorted(range(len(lengths)), key=lambda i: (-lengths[i], i))
    groups: list[list[int]] = []
    for number in order:
        if groups and lengths[number] * 2 >= lengths[groups[-1][0]]:
            groups[-1].append(number)
        else:
            groups.append([number])
    return groups


class Capture:
    """Runs one target replica over packs, up to the last block needed and without logits.

    Documents run as a right-padded batch: a causal target cannot see padding to the right, so no mask is needed and the
    states are those of each document alone, whatever the family. final: run all blocks, and keep what the head is given too.
    """

    def __init__(self, target: Target, layer_ids: Sequence[int], *, final: bool = False) -> None:
        self.device, self.width, self.count, self.final = target.device, target.hidden_size, len(layer_ids), final
        self.dtype = target.embedding.dtype
        # A copy over the same weights: its hooks and its shorter list of blocks leave the target itself untouched.
        decoder, name = share_weights(target.decoder), target.blocks_path.rpartition(".")[2]
        if not final:
            setattr(decoder, name, nn.ModuleList(list(find_blocks(decoder, name))[: max(layer_ids) + 1]))
        self._decoder = decoder
        self._recorder = Recorder(find_blocks(decoder, name), layer_ids)

    def _empty(self, rows: int, columns: int) -> Tensor:
        return torch.zeros(rows, columns, dtype=self.dtype, device=self.device)

    def __call__(self, tokens: Tokens) -> HiddenStates:
        """Features [S, n*D] of one pack, zero on padding, on the target's device."""
        features = self._empty(tokens.bucket, self.count * self.width)
        final = self._empty(tokens.bucket, self.width) if self.final else None
        starts = list(itertools.accumulate(tokens.lengths, initial=0))
        for group in _groups(tokens.lengths):
            longest = tokens.lengths[group[0]]
            ids = torch.zeros(len(group), longest, dtype=torch.long)
            for row, number in enumerate(group):
                ids[row, : tokens.lengths[number]] = tokens.ids[starts[number] : starts[number + 1]]
            with torch.inference_mode():
                last = self._decoder(input_ids=ids.to(self.device), use_cache=False).last_hidden_state
                states = self._recorder.take(self.width)
            # Copied out of inference mode: autograd may not save inference tensors for the drafter's backward.
            for row, number in enumerate(group):
                place, length = slice(starts[number], starts[number + 1]), tokens.lengths[number]
                features[place] = states[row, :length]
                if final is not None:
                    final[place] = last[row, :length]
        ready = None
        if self.device.type == "cuda":
            ready = torch.cuda.Event()
            ready.record(torch.cuda.current_stream(self.device))
        return HiddenStates(features, ready, final)
