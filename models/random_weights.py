"""Random weights, made where they are used: the same bits for every rank count and device.

The value of an element depends on the tensor's name and on the element's place in the whole
tensor, so a rank makes its own ranges and no others. Every number is one whole number times one
constant, rounded once to fp32 and once to the dtype of the model.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from hashlib import blake2b
from pathlib import Path

import torch
from torch import Tensor

from unisono.models.checkpoint import Checkpoint, open_checkpoint
from unisono.models.ledger import WeightSource
from unisono.models.overlay import overlay_part_of
from unisono.models.weight_specs import WeightSpec
from unisono.ops.reference.random_values import STD, random_values

SMALL = 2.0**-18
"""Norms are 1 + number * this, within 1/4 of 1, deviation 0.1; biases the same around 0."""
SHARPNESS = 2.0
"""Of queries and keys: with scores of deviation 4 attention chooses instead of averaging. At 1 the
rows of a deep model grow alike, and greedy answers soon repeat one token. Of routers too: among
experts of like weight the sum of the chosen ones would be small."""
DECAY = 11 * 2.0**-19
"""A_log is a number times this about 1.375: from 0 to 2.75, as logarithms of 1 to 16."""
STEP = 2.0**-15
"""dt_bias is a number times this about -4.5: one head of a delta net forgets within a few tokens,
another within hundreds, as trained ones do."""
_CHUNK = {"cpu": 1 << 17, "cuda": 1 << 22}
"""Elements made at a time: what stays in a core's cache; on a GPU, what hides the launches."""


class RandomWeights:
    """A source of weights for the ledger that needs no file. `dtype`: of the model.

    Matrices [out, in], the embedding among them, have deviation 1 / sqrt(in), those of queries,
    keys and routers SHARPNESS times as much: hidden states and logits are of the order of one, the
    layers outweigh the embedding in the residual stream, so that a tied head does not answer with
    the token it was given, and two greatest logits are practically never equal.
    """

    names = ()

    def __init__(self, dtype: torch.dtype) -> None:
        self._item_bytes = dtype.itemsize

    def nbytes(self, spec: WeightSpec) -> int:
        """The bytes that `spec`'s part takes in memory."""
        return spec.nbytes(self._item_bytes)

    def copy_into(self, spec: WeightSpec, target: Tensor) -> None:
        """Fill `target` (`spec.local_shape`, any floating dtype and device)."""
        fill_random(spec, target)


class Overlaid:
    """A checkpoint of which some parts (`models/overlay.py`) are random."""

    def __init__(
        self, checkpoint: Checkpoint, random: RandomWeights, parts: frozenset[str]
    ) -> None:
        self._checkpoint = checkpoint
        self._random = random
        self._parts = parts
        self.names = checkpoint.names

    def nbytes(self, spec: WeightSpec) -> int:
        """What the source of `spec` says."""
        return self._source_of(spec).nbytes(spec)

    def copy_into(self, spec: WeightSpec, target: Tensor) -> None:
        """Fill `target` from the source of `spec`. Raises CheckpointError."""
        self._source_of(spec).copy_into(spec, target)

    def _source_of(self, spec: WeightSpec) -> WeightSource:
        return self._random if overlay_part_of(spec.name) in self._parts else self._checkpoint


@contextmanager
def open_weights(
    path: str, load_format: str, parts: frozenset[str], dtype: torch.dtype
) -> Iterator[WeightSource]:
    """Open what the ranks' weights come from; `load_format` is "auto" (files) or "random".

    Raises CheckpointError for files that cannot be read.
    """
    random = RandomWeights(dtype)
    if load_format == "random":
        yield random
        return
    with open_checkpoint(Path(path)) as checkpoint:
        yield Overlaid(checkpoint, random, parts) if parts else checkpoint


@torch.no_grad()
def fill_random(spec: WeightSpec, target: Tensor) -> None:
    """Write the part of tensor `spec.name` that `spec` names into `target`."""
    for piece, place in spec.pieces():
        _fill(piece, target[place])


def _fill(spec: WeightSpec, target: Tensor) -> None:
    """A part that is one range."""
    # A vector is one row; what has three dimensions, rows of all the rest.
    width = math.prod(spec.shape[1:]) if len(spec.shape) > 1 else spec.shape[0]
    cut_rows, cut_columns = _ranges(spec, width)
    rows = target.view(len(cut_rows), len(cut_columns)) if target.dim() != 2 else target
    columns = _int32s(cut_columns, target.device)
    seeds = _seeds(spec.name)
    step = max(1, _CHUNK.get(target.device.type, 1 << 17) // max(len(cut_columns), 1))
    for first in range(0, len(cut_rows), step):
        numbers = _int32s(cut_rows[first : first + step], target.device).mul_(_wrapped(width))
        values = random_values(numbers[:, None] + columns, seeds)
        rows[first : first + step].copy_(_scaled(values, spec))


def _scaled(values: Tensor, spec: WeightSpec) -> Tensor:
    """Whole numbers to weights, in place: one rounding, whatever the device."""
    name = spec.name
    match overlay_part_of(name):
        case "norm":
            return values.mul_(SMALL).add_(0.0 if spec.zero_centred else 1.0)
        case "qk-norm":
            return values.mul_(SMALL * SHARPNESS).add_(SHARPNESS - spec.zero_centred)
        case "bias":
            return values.mul_(SMALL)
    if name.endswith(".A_log"):
        return values.mul_(DECAY).add_(2**16 * DECAY)
    if name.endswith(".dt_bias"):
        return values.mul_(STEP).add_(-4.5)
    sharp = name.endswith((".q_proj.weight", ".k_proj.weight", ".mlp.gate.weight"))
    deviation = (SHARPNESS if sharp else 1.0) * spec.shape[-1] ** -0.5
    # A factor that fp32 holds: no device may round it in a way of its own.
    return values.mul_(torch.tensor(deviation / STD).item())


def _ranges(spec: WeightSpec, width: int) -> tuple[range, range]:
    """Rows and columns of `spec`'s part; a vector is one row."""
    is_vector = len(spec.shape) == 1
    whole = [range(1 if is_vector else spec.shape[0]), range(width)]
    if spec.dim is not None:
        whole[1 if is_vector else spec.dim] = range(spec.start, spec.stop)
    return whole[0], whole[1]


def _seeds(name: str) -> tuple[int, int]:
    digest = blake2b(name.encode(), digest_size=8).digest()
    return (
        int.from_bytes(digest[:4], "little", signed=True),
        int.from_bytes(digest[4:], "little", signed=True),
    )


def _int32s(numbers: range, device: torch.device) -> Tensor:
    return torch.arange(numbers.start, numbers.stop, dtype=torch.int32, device=device)


def _wrapped(number: int) -> int:
    """`number` modulo 2^32 as an int32."""
    return (number + (1 << 31)) % (1 << 32) - (1 << 31)
