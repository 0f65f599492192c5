"""How runs are judged: by bits, within a bound, and what the bound is."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch

from tests.launcher.fakes import tiny_model
from unisono.launcher.verify.bounds import Closeness, closeness, oracle_bound, rank_bound
from unisono.launcher.verify.compare import (
    MISSING,
    Difference,
    Verdict,
    judge,
    judge_drawn,
    judge_oracle,
    judge_ranks,
    with_margin,
)
from unisono.launcher.verify.drawing import noise
from unisono.launcher.verify.plan import Reach, Setting
from unisono.launcher.verify.run import NUM_TOP, Answer, Run
from unisono.ops.reference.gumbel import gumbel_noise

PLAIN = Setting(tp=1, dtype="float32")
PAIR = Setting(tp=2, dtype="float32")
NOTHING = Reach(
    longest_prompt=0, num_cached_tokens=0, num_preemptions=0, num_replays=0, num_drafted=0
)
BOUND = 1e-3


def run_of(setting: Setting, tokens: list[int], sums: list[int], *, summed: bool = True) -> Run:
    answer = Answer(prompt=0, token_ids=tokens, checksums=sums, is_summed=summed)
    return Run(setting=setting, answers=[answer], reach=NOTHING)


def wire(rows: Sequence[dict[int, float]], num_top: int = NUM_TOP) -> array[int]:
    """Log-probabilities as they travel; the first id of a row is the likeliest, and its token."""
    items = array("i")
    for row in rows:
        pairs = [(i, row[i]) for i in row]
        items += array("i", array("f", [pairs[0][1]]).tobytes())
        items.append(1)
        for token, value in pairs + [(-1, 0.0)] * (num_top - len(pairs)):
            items.append(token)
            items += array("i", array("f", [value]).tobytes())
    return items


def test_a_differing_bit_and_a_differing_token_are_told_apart() -> None:
    plain = run_of(PLAIN, [5, 6, 7], [1, 2, 3])
    batch = replace(PLAIN, batch=8)
    base = judge(plain, plain)
    assert (base.ok, base.is_promise) == (True, False)
    bits = judge(run_of(batch, [5, 6, 7], [1, 9, 3]), plain)
    assert bits.first is not None
    assert (bits.ok, bits.num_other_tokens, bits.num_other_logits) == (False, 0, 1)
    assert (bits.first.token, bits.first.is_token) == (1, False)
    token_run = run_of(batch, [5, 6, 8], [1, 2, 3])
    token = judge(token_run, plain)
    assert token.first == Difference(prompt=0, request=0, token=2, want=7, got=8)
    assert [each.first for each in token.requests] == [token.first]
    missed = judge(run_of(replace(PLAIN, chunk=64), [5, 6, 7], [1, 2, 3]), plain)
    assert (missed.ok, missed.note) == (False, "not reached: no prompt is longer than a chunk")
    lost = judge(replace(plain, setting=batch, fault="rank 0 died"), plain)
    assert (lost.ok, lost.is_lost) == (False, True)
    chunk = run_of(replace(PLAIN, chunk=64), [5, 6, 7], [1, 2, 3])
    void = judge(chunk, plain, frozenset({"chunk"}))
    assert (void.ok, void.is_promise, void.note) == (True, False, missed.note)
    assert not judge(replace(chunk, answers=token_run.answers), plain, frozenset({"chunk"})).ok
    orphan = judge(run_of(batch, [5], [1]), replace(plain, fault="rank 0 died"))
    assert (orphan.ok, orphan.note) == (False, "nothing to compare with: rank 0 died")


def test_what_did_not_come_differs() -> None:
    plain = run_of(PLAIN, [5, 6, 7], [1, 2, 3])
    batch = replace(PLAIN, batch=8)
    short = judge(run_of(batch, [5, 6], [1, 2]), plain)
    assert short.first == Difference(prompt=0, request=0, token=2, want=7, got=MISSING)
    bare = judge(run_of(batch, [5, 6, 7], []), plain)
    assert (bare.ok, bare.first and bare.first.is_token) == (False, False)
    graphs = replace(PLAIN, batch=8)
    assert judge(run_of(graphs, [5, 6, 7], [], summed=False), plain).ok
    assert not judge(run_of(graphs, [5, 6, 8], [], summed=False), plain).ok


def test_the_bounds_grow_with_depth_and_with_coarser_numbers() -> None:
    model = tiny_model()
    deeper = replace(model, num_layers=4 * model.num_layers)
    for bound in (rank_bound, oracle_bound):
        bounds = [bound(model, dtype) for dtype in ("float32", "float16", "bfloat16")]
        assert bounds == sorted(bounds)
        assert bound(deeper, "float32") > bounds[0]
        assert bounds[0] < 1e-4


def test_closeness_is_measured_over_all_ids_that_both_have() -> None:
    base = [(-1.0, {4: -1.0, 7: -3.0})]
    mine = [(-1.0, {4: -1.0, 7: -3.5, 9: -4.0})]
    near = closeness([(mine, base)])
    assert near.scale == pytest.approx(math.sqrt((1 + 1 + 9) / 3))
    assert near.relative_rms == pytest.approx(math.sqrt(0.25 / 3) / near.scale)
    assert (near.largest, near.num_equal) == (0.5, 2)
    [(power, count)] = near.spread
    assert (2.0**power <= 0.5 / near.scale < 2.0 ** (power + 1), count) == (True, 1)
    for nothing in ([], [(mine, [])], [([(math.nan, {})], [(math.nan, {})])]):
        assert not closeness(nothing).relative_rms <= BOUND


def ranks(other: float, tokens: list[int], off: float = 5e-4) -> Verdict:
    """A pair of ranks whose likeliest ids, 5 and 6 in `base`, are `other` apart; on two ranks the
    second is likelier by `off`, and the first less likely."""
    base, run = run_of(PLAIN, [5, 5], [1, 2]), run_of(PAIR, tokens, [3, 4])
    rows = [{5: -1.0, 6: -1.0 - other, 7: -9.0}] * 2
    there = [{5: -1.0 - off, 6: -1.0 - other + off, 7: -9.0}] * 2
    return judge_ranks(run, base, [wire(there)], [wire(rows)], BOUND)


def test_rank_counts_may_part_at_a_near_tie_only() -> None:
    tie = ranks(1e-3, [5, 6])
    assert (tie.ok, tie.num_other_tokens, tie.num_tokens) == (True, 1, 2)
    assert tie.first is not None
    assert tie.first.margin == pytest.approx(1e-3, rel=1e-3)
    wide = ranks(0.5, [5, 6])
    assert (wide.ok, wide.note) == (
        False,
        "a token differs at a margin of 0.5: 0.0026 would be a near tie",
    )
    assert not ranks(1e-3, [5, 6], off=1e-5).ok, "no difference of theirs explains it"
    # An id that is not among the likeliest is at least as far as the last of them.
    assert not ranks(1e-3, [5, 8]).ok
    assert ranks(0.5, [5]).note == "an answer has another length"


def test_drawn_tokens_may_be_others_at_a_near_tie_only() -> None:
    base, run = run_of(PLAIN, [5, 5, 5], [1, 2, 3]), run_of(PAIR, [5, 6, 9], [1, 2, 3])
    near = Closeness(relative_rms=1e-4, scale=8.0, largest=0.0, num_equal=0, spread=())
    tie = judge_drawn(run, base, {0: 4e-3}, near, BOUND)
    assert (tie.ok, tie.num_tokens, tie.num_other_tokens) == (True, 2, 1)
    wide = judge_drawn(run, base, {0: 6e-3}, near, BOUND)
    assert (wide.ok, wide.first and wide.first.got) == (False, 6)
    assert judge_drawn(base, base, {}, near, BOUND).num_other_tokens == 0


def test_the_noise_of_a_token_is_that_of_the_ranks() -> None:
    seeds, positions = torch.tensor([0, 2**63 - 1]), torch.tensor([0, 40_000])
    want = gumbel_noise(seeds, positions, 1000, 3).tolist()
    for seed, position, row in zip(seeds.tolist(), positions.tolist(), want, strict=True):
        got = [noise(seed, position, 1000 + at) for at in range(3)]
        assert got == pytest.approx(row, rel=1e-12)


def test_rank_counts_are_held_to_the_bound() -> None:
    base, run = run_of(PLAIN, [5], [1]), run_of(PAIR, [5], [3])
    near, far = [{5: -1.0, 6: -3.0001}], [{5: -1.0, 6: -3.1}]
    want = [wire([{5: -1.0, 6: -3.0}])]
    verdict = judge_ranks(run, base, [wire(near)], want, BOUND)
    assert (verdict.ok, verdict.against, verdict.bound) == (True, "1 rank", BOUND)
    off = judge_ranks(run, base, [wire(far)], want, BOUND)
    assert (off.ok, off.first) == (False, None)
    assert off.note.startswith("log-probabilities are off by 0.03; 0.001 is")


def test_the_oracle_is_asked_at_every_place_of_prompt_and_answer() -> None:
    run = run_of(PLAIN, [5, 5], [1, 2])
    prompts = [(3, 4)]
    mine = [{5: -1.0, 6: -1.001}, {5: -1.0, 6: -3.0}, {5: -1.0, 6: -3.0}]
    same = [wire([{5: row[5], **row} for row in mine], NUM_TOP + 1)]
    verdict = judge_oracle(run, prompts, [wire(mine)], same, BOUND)
    assert (verdict.ok, verdict.num_tokens, verdict.num_other_tokens) == (True, 3, 0)
    assert verdict.against == "transformers"
    tie = [{6: -1.0, 5: -1.001}, *mine[1:]]
    verdict = judge_oracle(run, prompts, [wire(mine)], [wire(tie, NUM_TOP + 1)], BOUND)
    assert (verdict.ok, verdict.num_other_tokens) == (True, 1)
    assert verdict.first is not None
    assert (verdict.first.token, verdict.first.want, verdict.first.got) == (-1, 6, 5)
    other = [*mine[:2], {6: -1.0, 5: -3.0}]
    verdict = judge_oracle(run, prompts, [wire(mine)], [wire(other, NUM_TOP + 1)], BOUND)
    assert not verdict.ok
    assert verdict.first is not None
    assert (verdict.first.token, verdict.first.margin) == (1, 2.0)


def test_a_margin_is_that_of_the_candidates() -> None:
    plain = Answer(prompt=0, token_ids=[5], checksums=[1], logprobs=wire([{5: -1.0, 6: -1.25}]))
    other = replace(plain, checksums=[2], logprobs=wire([{5: -1.5, 6: -1.25}]))
    batch = replace(PLAIN, batch=8)
    verdict = judge(
        Run(setting=batch, answers=[other], reach=NOTHING),
        Run(setting=PLAIN, answers=[plain], reach=NOTHING),
    )
    measured = with_margin(verdict, plain, other).first
    assert measured is not None
    assert (measured.margin, measured.largest) == (0.25, 0.5)
    assert with_margin(verdict, replace(plain, logprobs=wire([])), other) == verdict
