"""Attention of blocks over a shared context, for CPUs: only what a block sees is multiplied, in parts that stay in cache.

A dense mask makes every slot score every other block's slots and all context after its anchor, only to throw them away, and a score
matrix of that size goes through memory several times. Here blocks are taken a few at a time, with the context they see and their own
slots; scores are made again in the backward pass, as flash attention does (arXiv 2205.14135), so that none is kept.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from torch import Tensor

# Scores that exist at once: 4 MiB of fp32, about what the cores share in cache.
SCORES = 2**20


class PartMask(NamedTuple):
    """What the slots of each block see. context: bool [A, S], one run of positions per block, alike for all its slots; own: bool [K, K],
    query slot by key slot, alike in all blocks."""

    context: Tensor
    own: Tensor


class _Part(NamedTuple):
    """Blocks `first` to `last` and the context they see, `start` to `stop`; from `common_start` to `common_stop` all of them do."""

    first: int
    last: int
    start: int
    stop: int
    common_start: int
    common_stop: int


def _parts(seen: Tensor, rows: int) -> Iterator[_Part]:
    """Neighbouring blocks in parts of at most `SCORES` scores, at least one block each. rows: slots of a block times heads."""
    counts, starts = seen.sum(dim=1).tolist(), seen.long().argmax(dim=1).tolist()
    first = 0
    while first < len(counts):
        part = _Part(
            first, first + 1, starts[first], starts[first] + counts[first], starts[first], starts[first] + counts[first]
        )
        for block in range(first + 1, len(counts)):
            wider = _joined(part, starts[block], starts[block] + counts[block])
            if rows * (wider.last - first) * (wider.stop - wider.start) > SCORES:
                break
            part = wider
        yield part
        first = part.last


def _joined(part: _Part, start: int, stop: int) -> _Part:
    """A part and the block after it, which sees the context from `start` to `stop`."""
    common = max(part.common_start, start), min(part.common_stop, stop)
    if part.start == part.stop:
        return _Part(part.first, part.last + 1, start, stop, *common)
    if start == stop:
        start, stop = part.start, part.stop
    return _Part(part.first, part.last + 1, min(part.start, start), max(part.stop, stop), *common)


class _Operands(NamedTuple):
    """query: [G, A, H/G, K, d], scaled; keys and values of the context [G, S, d] and of the blocks [G, A, K, d]."""

    query: Tensor
    context_key: Tensor
    context_value: Tensor
    own_key: Tensor
    own_value: Tensor

    def rows(self, part: _Part) -> Tensor:
        """Queries of a part, [G, N, d]."""
        return self.query[:, part.first : part.last].flatten(1, 3)


def _operands(
    query: Tensor, context_key: Tensor, context_value: Tensor, own_key: Tensor, own_value: Tensor, blocks: int
) -> _Operands:
    groups = own_key.shape[1]
    scaled = query[0].unflatten(1, (blocks, -1)).unflatten(0, (groups, -1)).transpose(1, 2) * query.shape[-1] ** -0.5
    own = [x[0].unflatten(1, (blocks, -1)) for x in (own_key, own_value)]
    return _Operands(scaled.contiguous(), context_key[0], context_value[0], *own)


def _scratch(parts: list[_Part], like: Tensor, own: Tensor) -> Tensor:
    """Room for the scores of any one part: made once per call, since fresh memory costs a CPU more than what is done in it.

    like: queries [G, A, H/G, K, d]; own: keys of the blocks [G, A, K, d].
    """
    rows = like[:, 0].numel() // like.shape[-1]
    return like.new_empty(max(rows * (part.last - part.first) * (part.stop - part.start + own.shape[2]) for part in parts))


def _products(rows: Tensor, context: Tensor, own: Tensor, part: _Part, scratch: Tensor) -> Tensor:
    """Every row of a part times what it may see, [G, N, W + K]: context [G, S, d] first, its own block of [G, A, K, d] after."""
    context, own = context[:, part.start : part.stop], own[:, part.first : part.last]
    width = context.shape[1]
    shape = (*rows.shape[:2], width + own.shape[2])
    made = scratch[: math.prod(shape)].view(shape)
    for group in range(rows.shape[0]) if width else ():
        torch.mm(rows[group], context[group].T, out=made[group, :, :width])
    made[:, :, width:] = (rows.unflatten(1, (part.last - part.first, -1)) @ own.transpose(-1, -2)).flatten(1, 2)
    return made


def _weights(operands: _Operands, seen: Tensor, own_seen: Tensor, part: _Part, scratch: Tensor) -> Tensor:
    """Softmax over what each row of a part sees, [G, N, W + K]; sums in fp32."""
    scores = _products(operands.rows(part), operands.context_key, operands.own_key, part, scratch)
    width = part.stop - part.start
    blocks = scores.unflatten(1, (part.last - part.first, -1))
    low = min(max(part.common_start, part.start), part.stop)
    high = min(max(part.common_stop, low), part.stop)
    for edge in (slice(part.start, low), slice(high, part.stop)):
        if edge.start < edge.stop:
            unseen = ~seen[part.first : part.last, None, edge]
            blocks[..., edge.start - part.start : edge.stop - part.start].masked_fill_(unseen, float("-inf"))
    if not own_seen.all():
        slots = own_seen.shape[0]
        blocks[..., width:].unflatten(2, (-1, slots)).masked_fill_(~own_seen, float("-inf"))
    return torch._softmax(scores, -1, False, out=scores)


@torch.library.custom_op("draftsmith::attend_blocks", mutates_args=())
def attend_blocks(
    query: Tensor,
    context_key: Tensor,
    context_value: Tensor,
    own_key: Tensor,
    own_value: Tensor,
    seen: Tensor,
    own_seen: Tensor,
) -> Tensor:
    """Grouped-query attention of all slots, differentiable in queries, keys and values: [1, H, A*K, d].

    query: [1, H, A*K, d]; keys and values: [1, G, S, d] of the context and [1, G, A*K, d] of the blocks; the mask as in `PartMask`.
    One operation to a compiler: how much a part sees is data, and would be a graph of its own.
    """
    blocks = seen.shape[0]
    operands = _operands(query, context_key, context_value, own_key, own_value, blocks)
    out = torch.empty_like(operands.query)
    parts = list(_parts(seen, operands.query[:, 0].numel() // query.shape[-1]))
    scratch = _scratch(parts, operands.query, operands.own_key)
    for part in parts:
        weights = _weights(operands, seen, own_seen, part, scratch)
        width, count = part.stop - part.start, part.last - part.first
        summed = (weights[:, :, width:].unflatten(1, (count, -1)) @ operands.own_value[:, part.first : part.last]).flatten(1, 2)
        for group in range(summed.shape[0]) if width else ():
            summed[group].addmm_(weights[group, :, :width], operands.context_value[group, part.start : part.stop])
        out[:, part.first : part.last] = summed.view_as(out[:, part.first : part.last])
    return out.transpose(1, 2).reshape_as(query)


@attend_blocks.register_fake
def _(query: Tensor, *_others: Tensor) -> Tensor:
    return query.new_empty(query.shape)


@torch.library.custom_op("draftsmith::attend_blocks_backward", mutates_args=())
def _backward(
    grad: Tensor,
    query: Tensor,
    context_key: Tensor,
    context_value: Tensor,
    own_key: Tensor,
    own_value: Tensor,
    seen: Tensor,
    own_seen: Tensor,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of the queries, keys and values from that of the output, in their shapes. Sums over parts are in fp32."""
    blocks, scale = seen.shape[0], query.shape[-1] ** -0.5
    operands = _operands(query, context_key, context_value, own_key, own_value, blocks)
    grads = grad[0].unflatten(1, (blocks, -1)).unflatten(0, (own_key.shape[1], -1)).transpose(1, 2).contiguous()
    to_query = torch.empty_like(operands.query)
    to_key, to_value = (torch.zeros(operands.context_key.shape, dtype=torch.float32) for _ in range(2))
    to_own_key, to_own_value = (torch.empty(x.shape, dtype=x.dtype) for x in (operands.own_key, operands.own_value))
    parts = list(_parts(seen, operands.query[:, 0].numel() // query.shape[-1]))
    scratch, second = (_scratch(parts, operands.query, operands.own_key) for _ in range(2))
    for part in parts:
        width, here, context = part.stop - part.start, slice(part.first, part.last), slice(part.start, part.stop)
        weights = _weights(operands, seen, own_seen, part, scratch)
        rows, back = operands.rows(part), grads[:, here].flatten(1, 3)
        through = _products(back, operands.context_value, operands.own_value, part, second)
        # The gradient of the scores, weights * (through - sum(weights * through)), in one pass.
        torch._softmax_backward_data(through, weights, -1, weights.dtype, grad_input=through)

        def by_block(x: Tensor, count: int = part.last - part.first) -> Tensor:
            return x.unflatten(1, (count, -1))

        to_own_value[:, here] = by_block(weights[:, :, width:]).transpose(-1, -2) @ by_block(back)
        to_own_key[:, here] = by_block(through[:, :, width:]).transpose(-1, -2) @ by_block(rows)
        summed = (by_block(through[:, :, width:]) @ operands.own_key[:, here]).flatten(1, 2)
        for group in range(rows.shape[0]) if width else ():
            to_value[group, context] += weights[group, :, :width].T @ back[group]
            to_key[group, context] += through[group, :, :width].T @ rows[group]
            summed[group].addmm_(through[group, :, :width], operands.context_key[group, context])
        to_query[:, here] = summed.view_as(to_query[:, here]) * scale
    return (
        to_query.transpose(1, 2).reshape_as(query),
        to_key.to(query.dtype)[None],
        to_value.to(query.dtype)[None],
        to_own_key.flatten(1, 2)[None],
        to_own_value.flatten(1, 2)[None],
    )


@_backward.register_fake
def _(_grad: Tensor, *operands: Tensor) -> tuple[Tensor, ...]:
    return tuple(x.new_empty(x.shape) for x in operands[:5])


def _save(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:  # noqa: ARG001 - the library passes it by this name
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    return (*_backward(grad, *ctx.saved_tensors), None, None)


attend_blocks.register_autograd(_differentiate, setup_context=_save)
