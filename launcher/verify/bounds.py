"""How far logits may be from each other where the same bits are not promised. Pure.

Another rank count adds the same numbers in another order. There the bound is this, of the relative
rms of the logits:

    sigma(dtype) = 2 sqrt(2 L + 2) (u(dtype) + u(float32) sqrt(K))

with L layers, K terms in the longest product and u the unit roundoff (2^-24, 2^-11 or 2^-8 for
float32, float16, bfloat16). 2 L + 2 sums are cut (two a layer, embedding and head); each is rounded
once to the dtype, and its K terms in fp32, in another order; the errors of sums add like a random
walk, and 2 covers what norms and activations make of them. Measured: 0.1 to 0.6 of the walk alone,
on models of 2 to 30 layers.

Another program (`--against transformers`, in float32) rounds everywhere, not at the cut sums alone:

    sigma(dtype) = sqrt((16 L + 3) / 3) (u(dtype) + u(float32) sqrt(K))

On its way through a layer a number is rounded 16 times: the norm, the weights (of a checkpoint that
has more bits), the product, the rotation, probabilities, their sum over values, weights and product
again and the residual sum make 9; the norm, weights and product, the gate, weights and product and
the sum 7; embedding, last norm and head are 3 more. The rms of a rounding is at most u / sqrt(3).
Norms keep relative errors as they are, and a branch is a part of the residual stream only, so a
walk in which each counts in full is about right. Measured in bfloat16: 0.14 to 0.64 sigma on twelve
tiny models of attention, 0.29 on the demo model, up to 0.99 on tiny hybrids, whose recurrent layers
round more often; in float32 0.04 to 0.2. The bound is 2 sigma.

It is measured with the plain answer as a prompt: then everyone sees the same tokens, and the
log-probabilities of each token and of the likeliest ones at its place stand for the logits, which
they equal but for a constant. A token may differ between rank counts only where the margin between
its candidates is below 6 times the rms of the differences that were measured: two logits, each
wrong by that, four deviations out; and only if each count has the token that its own
log-probabilities name, within the same. From another program it may differ at 6 sigma
rms(log-probabilities), sigma being the second one. Which experts a token goes to is no matter of
rounding: see `check_oracle`.
"""

from __future__ import annotations

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from unisono.models.config import ModelConfig
from unisono.workers.protocol import logprob_width

_ROUNDOFF = {"float32": 2.0**-24, "float16": 2.0**-11, "bfloat16": 2.0**-8}
_WALK = 2
_SLACK = 2
_TIE = 6
"""Deviations of a logit that a margin may be at a near tie."""
RANK_TOLERANCE = 8
"""How many sigma a single row of a replicated value may be off between rank counts."""


def rank_bound(model: ModelConfig, dtype: str) -> float:
    """Return the first sigma of the docstring above: between rank counts."""
    return _WALK * math.sqrt(2 * model.num_layers + 2) * _rounding(model, dtype)


def oracle_bound(model: ModelConfig, dtype: str) -> float:
    """Return two of the second sigma: from another program's float32."""
    return _SLACK * math.sqrt((16 * model.num_layers + 3) / 3) * _rounding(model, dtype)


def rank_tie(near: Closeness, bound: float) -> float:
    """The widest margin of a near tie between rank counts, whose answers are so `near`."""
    return _TIE * min(near.relative_rms, bound) * near.scale


def oracle_tie(near: Closeness, bound: float) -> float:
    """The same beside another program."""
    return _TIE / _SLACK * bound * near.scale


def _rounding(model: ModelConfig, dtype: str) -> float:
    """Relative error of a sum: of its rounding to `dtype` and of its terms in fp32."""
    terms = max(model.hidden_size, model.intermediate_size)
    return _ROUNDOFF[dtype] + _ROUNDOFF["float32"] * math.sqrt(terms)


Entry = tuple[float, Mapping[int, float]]
"""Log-probability of a token, and of the likeliest ids at its place, likeliest first."""


def entries(items: array[int], num_top: int) -> Iterator[Entry]:
    """Read log-probabilities as they travel: `logprob_width` items each."""
    width = logprob_width(num_top)
    reals = array("f")
    reals.frombytes(items.tobytes())
    for at in range(0, len(items), width):
        yield (
            reals[at],
            {items[i]: reals[i + 1] for i in range(at + 2, at + width, 2) if items[i] >= 0},
        )


def margin_between(entry: Entry, want: int, got: int) -> float:
    """Between two ids, at least, if one is not among the likeliest; of one id, the best two."""
    if want == got:
        best, second, *_ = sorted(entry[1].values(), reverse=True)
        return best - second
    least = min(entry[1].values())
    return abs(entry[1].get(want, least) - entry[1].get(got, least))


def margin_to_best(entry: Entry, got: int) -> float:
    """From an id to the likeliest; 0 of that."""
    chances = entry[1].values()
    return max(chances) - entry[1].get(got, min(chances))


def largest_between(mine: Entry, base: Entry) -> float:
    """Largest difference over the ids that both have."""
    both = mine[1].keys() & base[1].keys()
    return max((abs(mine[1][i] - base[1][i]) for i in both), default=math.inf)


@dataclass(frozen=True, slots=True, kw_only=True)
class Closeness:
    """How far log-probabilities are from those they are compared with."""

    relative_rms: float
    """Of the differences, over the rms of what is compared with; inf: there are none."""
    scale: float
    """That rms."""
    largest: float
    """Largest difference."""
    num_equal: int
    """Differences of exactly 0."""
    spread: tuple[tuple[int, int], ...]
    """(e, n): n differences are at least 2^e and below 2^(e + 1) times `scale`, e ascending."""


def closeness(pairs: Iterable[tuple[Sequence[Entry], Sequence[Entry]]]) -> Closeness:
    """Compare the entries of each prompt, (mine, those they are compared with)."""
    differences: list[float] = []
    total = 0.0
    for mine, theirs in pairs:
        if len(mine) != len(theirs):
            return _NOTHING
        for (own, top), (base_own, base_top) in zip(mine, theirs, strict=True):
            values = [(own, base_own)]
            values += [(top[i], base_top[i]) for i in top.keys() & base_top.keys()]
            differences += [abs(a - b) for a, b in values]
            total += sum(b * b for _, b in values)
    if not total or not math.isfinite(total):
        return _NOTHING
    scale = math.sqrt(total / len(differences))
    off = math.sqrt(sum(d * d for d in differences) / len(differences))
    powers = Counter(math.frexp(d / scale)[1] - 1 for d in differences if 0 < d < math.inf)
    return Closeness(
        relative_rms=off / scale,
        scale=scale,
        largest=max(differences),
        num_equal=differences.count(0.0),
        spread=tuple(sorted(powers.items())),
    )


_NOTHING = Closeness(relative_rms=math.inf, scale=1.0, largest=math.inf, num_equal=0, spread=())
