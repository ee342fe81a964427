"""Frozen linear layers in the layout that a CPU's own kernels read, for decoding.

A product of few rows with a weight as it lies in a checkpoint spends most of its time rearranging the weight, at every call. Packed once,
the check of a block takes about half the time, and a large head a fifth. Torch has the kernels (oneDNN's) for compiled models that are
frozen; here they are called alone.
"""

import torch
from torch import Tensor, nn

from draftsmith.draft.model import Linear

# For how many rows the layout is chosen; it serves others too.
ROWS = 8


def pack(weight: Tensor) -> Tensor | None:
    """A weight [O, I] packed, or None where its device or type has no packed kernel: on GPUs, and for bf16 on CPUs that compute in fp32
    alone, which read a short type faster as it is."""
    if weight.device.type != "cpu" or not torch.backends.mkldnn.is_available():
        return None
    if weight.dtype is torch.bfloat16 and not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return None
    if weight.dtype not in (torch.float32, torch.bfloat16):
        return None
    packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight.detach(), ROWS)
    return packed


def packed_product(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """`rows @ weight.T + bias`, [..., O], for rows [..., I] and a packed weight; not differentiable."""
    made: Tensor = torch.ops.mkldnn._linear_pointwise(rows, weight, bias, "none", [], "")
    return made


class PackedLinear(nn.Module):
    """Stands for a linear layer whose weight was packed."""

    def __init__(self, packed: Tensor, bias: Tensor | None) -> None:
        super().__init__()
        self.out_features, self.in_features = packed.shape
        self.packed: Tensor
        self.bias: Tensor | None
        self.register_buffer("packed", packed, persistent=False)
        self.register_buffer("bias", None if bias is None else bias.detach(), persistent=False)

    @property
    def weight(self) -> Tensor:
        """The weight [O, I] as it was, a copy: models ask it for its type."""
        return self.packed.to_dense()

    def forward(self, rows: Tensor) -> Tensor:
        """[..., I] -> [..., O]."""
        return packed_product(rows, self.packed, self.bias)


def pack_linears(model: nn.Module) -> None:
    """Replace the linear layers of a frozen model, wherever their weights can be packed; the weights as they were are let go."""
    layers = [(parent, name, layer) for parent in model.modules() for name, layer in parent.named_children()]
    for parent, name, layer in layers:
        # Another subclass may do more than multiply.
        if isinstance(layer, nn.Linear) and type(layer) in (nn.Linear, Linear):
            packed = pack(layer.weight)
            if packed is not None:
                setattr(parent, name, PackedLinear(packed, layer.bias))
