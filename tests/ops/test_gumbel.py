"""Drawn tokens have the exact distribution, and their noise depends on its three keys alone."""

from __future__ import annotations

import math

import pytest
import torch

from tests.closeness import assert_same_bits
from unisono.ops.reference import gumbel
from unisono.ops.reference.filters import filter_logits
from unisono.ops.reference.gumbel import add_noise, chance, gumbel_noise
from unisono.ops.reference.sampling import argmax_keys, unpack_keys

DRAWS = 20_000
LOGITS = [2.0, -1.0, 0.5, 0.5, 1.9, -3.0, 0.0, 1.0, 0.5, -0.5, 1.2]
MASK = (1 << 64) - 1


def mixed(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & MASK
    return x ^ (x >> 31)


def draw(seeds: torch.Tensor, positions: torch.Tensor, **options: float) -> list[int]:
    """One token of `LOGITS` for each seed and position."""
    rows = len(seeds)
    logits = torch.tensor(LOGITS).repeat(rows, 1)
    temperature = torch.full((rows,), options.get("temperature", 1.0), dtype=torch.float64)
    left = filter_logits(
        logits,
        temperature,
        torch.full((rows,), int(options.get("top_k", 0))),
        torch.full((rows,), options.get("top_p", 1.0), dtype=torch.float64),
        torch.full((rows,), options.get("min_p", 0.0), dtype=torch.float64),
    )
    noisy = add_noise(left, temperature, seeds, positions, 0)
    return unpack_keys(argmax_keys(noisy, 0, len(LOGITS)))[0].tolist()


def expected(
    temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> list[float]:
    """The distribution by its definition, in plain numbers."""
    weights = [math.exp(logit / temperature) for logit in LOGITS]
    order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    order = order[: top_k or None]
    total, mass, kept = sum(weights[i] for i in order), 0.0, []
    for i in order:
        if top_p < 1 and mass >= top_p * total:
            break
        kept.append(i)
        mass += weights[i]
    kept = [i for i in kept if weights[i] >= min_p * weights[order[0]]]
    total = sum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(weights))]


def assert_drawn_from(tokens: list[int], chances: list[float]) -> None:
    """Pearson's chi-square below what one run in about 10,000 exceeds."""
    counts = [tokens.count(i) for i in range(len(chances))]
    assert all(n == 0 for n, p in zip(counts, chances, strict=True) if p == 0)
    pairs = [(n, p * len(tokens)) for n, p in zip(counts, chances, strict=True) if p > 0]
    statistic = sum((n - want) ** 2 / want for n, want in pairs)
    freedom = len(pairs) - 1
    if freedom == 0:
        assert statistic == 0
        return
    spread = 2 / (9 * freedom)  # Wilson and Hilferty
    assert statistic < freedom * (1 - spread + 3.72 * math.sqrt(spread)) ** 3, (counts, pairs)


CASES = [
    {},
    {"temperature": 0.5},
    {"temperature": 2.5},
    {"top_k": 1},
    {"top_k": 5},
    {"top_p": 0.6},
    {"top_p": 0.01},
    {"min_p": 0.3},
    {"min_p": 1.0},
    {"top_k": 6, "top_p": 0.7},
    {"top_p": 0.9, "min_p": 0.2},
    {"temperature": 1.7, "top_k": 7, "top_p": 0.85, "min_p": 0.5},
]


@pytest.mark.parametrize("options", CASES, ids=str)
def test_draws_match_the_exact_distribution(options: dict[str, float]) -> None:
    chances = expected(**options)  # type: ignore[arg-type]
    positions = torch.arange(DRAWS)
    assert_drawn_from(draw(torch.full((DRAWS,), 1234), positions, **options), chances)


def test_the_cases_filter_what_they_should() -> None:
    kept = [sum(p > 0 for p in expected(**case)) for case in CASES]  # type: ignore[arg-type]
    assert kept == [11, 11, 11, 1, 5, 3, 1, 4, 1, 3, 7, 4]


def test_draws_of_neighbouring_seeds_are_independent() -> None:
    seeds = torch.arange(DRAWS)
    tokens = draw(seeds, torch.full((DRAWS,), 77))
    chances = expected()
    assert_drawn_from(tokens, chances)
    pairs = [a * len(LOGITS) + b for a, b in zip(tokens[::2], tokens[1::2], strict=True)]
    assert_drawn_from(pairs, [p * q for p in chances for q in chances])


def test_draws_at_neighbouring_positions_are_independent() -> None:
    tokens = draw(torch.full((DRAWS,), 5), torch.arange(DRAWS))
    chances = expected()
    pairs = [a * len(LOGITS) + b for a, b in zip(tokens[::2], tokens[1::2], strict=True)]
    assert_drawn_from(pairs, [p * q for p in chances for q in chances])


def test_noise_is_the_published_hash() -> None:
    """splitmix64 of seed 0 begins with a known number; the noise follows from its formula."""
    first = gumbel._mix(torch.tensor([gumbel._GOLDEN]))
    assert int(first) & MASK == 0xE220A8397B1DCDAF
    golden = 0x9E3779B97F4A7C15
    for seed, position, token in [(0, 0, 0), (42, 7, 198), (2**63 - 1, 4095, 151_935)]:
        start = mixed((mixed((seed + golden) & MASK) + (position + 1) * golden) & MASK)
        bits = mixed((start + (token + 1) * golden) & MASK)
        want = -math.log(-math.log(((bits >> 12) + 0.5) * 2.0**-52))
        got = gumbel_noise(torch.tensor([seed]), torch.tensor([position]), token, 1)
        assert float(got) == pytest.approx(want, rel=1e-12)


def test_chance_is_even_and_independent_of_noise() -> None:
    """Of a position's own: sixteen classes of chance beside the token that is drawn there."""
    seeds, positions = torch.full((DRAWS,), 1234), torch.arange(DRAWS)
    luck = chance(seeds, positions)
    assert luck.dtype == torch.float64
    assert 0 < float(luck.min()) < float(luck.max()) < 1
    classes = (luck * 16).long().tolist()
    assert_drawn_from(classes, [1 / 16] * 16)
    chances = expected()
    tokens = draw(seeds, positions)
    pairs = [a * len(chances) + b for a, b in zip(classes, tokens, strict=True)]
    assert_drawn_from(pairs, [p / 16 for _ in range(16) for p in chances])
    assert_same_bits("alone", chance(seeds[7:8], positions[7:8]), luck[7:8])


def test_noise_is_finite_at_both_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    for bits, sign in [(0, -1), (-1, 1)]:
        monkeypatch.setattr(gumbel, "_mix", lambda x, bits=bits: torch.full_like(x, bits))
        noise = gumbel_noise(torch.zeros(1, dtype=torch.int64), torch.zeros(1).long(), 0, 3)
        assert bool(noise.isfinite().all())
        assert bool((noise * sign > 3).all())


def test_a_shard_has_the_noise_of_its_ids() -> None:
    logits = torch.randn(20, 199)
    temperature = torch.rand(20, dtype=torch.float64) + 0.5
    seeds, positions = torch.randint(2**62, (20,)), torch.arange(20)
    whole = add_noise(logits, temperature, seeds, positions, 0)
    for first, stop in [(0, 64), (64, 199), (198, 199)]:
        part = add_noise(logits[:, first:stop], temperature, seeds, positions, first)
        assert_same_bits("shard", part, whole[:, first:stop].contiguous())


def test_a_tiny_temperature_is_all_but_greedy_and_specials_stay() -> None:
    inf, nan = math.inf, math.nan
    logits = torch.tensor([[1.0, 2.0, 1.5], [-inf, -inf, 0.0], [3.0, nan, 1.0], [1.0, inf, 2.0]])
    temperature = torch.full((4,), 1e-300, dtype=torch.float64)
    noisy = add_noise(logits, temperature, torch.arange(4), torch.arange(4), 0)
    assert torch.equal(noisy.nan_to_num(9.0), logits.nan_to_num(9.0))
