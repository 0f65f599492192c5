"""Decode steps replayed from graphs: the same answers as eager ones, and nothing else touched."""

from __future__ import annotations

import gc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.closeness import assert_same_bits
from tests.rig import LocalEngine
from tests.scratch import live_bytes, poison_scratch
from tests.tiny import random_ids, write_checkpoint
from unisono.models.interface import Caches, ForwardBatch
from unisono.ops.by_reference import NEED_THE_HOST, REFERENCES, with_references
from unisono.ops.comm import solo_group
from unisono.ops.table import Ops
from unisono.runtime.protocol import SamplingParams
from unisono.workers.config import WorkerConfig
from unisono.workers.graph_pool import GraphPool
from unisono.workers.profile_run import capture_graphs
from unisono.workers.prompt_steps import Layout

pytestmark = pytest.mark.gpu

GPU = torch.device("cuda")
MODELS = (
    *("llama-untied-1003", "qwen2", "qwen3", "llama-bias-llama3"),
    *("qwen3-moe", "qwen3.5", "qwen3-next", "qwen3.5-moe"),
)


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp(request.param)
    write_checkpoint(request.param, directory)
    return directory


def prompts_for(path: Path, count: int) -> list[list[int]]:
    vocabulary = LocalEngine(path, max_model_len=16).config.vocab_size
    return [random_ids(3 + 7 * i % 90, vocabulary, seed=i) for i in range(count)]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_replayed_steps_answer_as_eager_ones(model: Path, dtype: str) -> None:
    """Heights padded and exact, requests joining and leaving, pre-emptions; logits by bits."""
    prompts = prompts_for(model, 14)
    params = [SamplingParams(logprobs=0 if i % 3 == 0 else None) for i in range(len(prompts))]
    params[4] = SamplingParams(temperature=0.8, top_p=0.9, seed=5)
    options = {"dtype": dtype, "device": GPU, "num_blocks": 24, "max_requests": 11}
    arrivals = [2 * i for i in range(len(prompts))]
    eager = LocalEngine(model, **options)
    replayed = LocalEngine(model, graphs=True, **options)
    want = eager.generate(prompts, 30, arrivals, params=params)
    for _ in range(2):
        got = replayed.generate(prompts, 30, arrivals, params=params)
        for index, (one, other) in enumerate(zip(want, got, strict=True)):
            assert other.token_ids == one.token_ids, f"prompt {index}"
            assert other.logprobs == one.logprobs, f"prompt {index}"
            pairs = zip(other.logits, one.logits, strict=True)
            for mine, theirs in ((a, b) for a, b in pairs if len(a)):
                assert_same_bits(f"logits of prompt {index}", mine, theirs)
    pool = replayed.ranks[0].pool
    assert pool.num_captures > 4
    assert pool.num_replays > 50


def test_draws_are_captured_and_a_slot_forgets_its_temperature(model: Path) -> None:
    """Slots that drew are handed to greedy requests, beside others that draw."""
    prompts = prompts_for(model, 12)
    params = [SamplingParams(temperature=0.9, seed=i) for i in range(12)]
    params[6:9] = [SamplingParams()] * 3
    arrivals = [3 * i for i in range(12)]
    options = {"dtype": "bfloat16", "device": GPU, "max_requests": 4}
    want = LocalEngine(model, **options).generate(prompts, 20, arrivals, params=params)
    engine = LocalEngine(model, graphs=True, **options)
    for _ in range(2):
        got = engine.generate(prompts, 20, arrivals, params=params)
        assert [answer.token_ids for answer in got] == [answer.token_ids for answer in want]
    reasons = engine.ranks[0].pool.eager_runs
    assert ("tail", "sampling") not in {k for k, n in reasons.items() if n > len(prompts) * 2}


def test_a_new_generation_is_captured_again_and_live_blocks_keep_their_bytes(model: Path) -> None:
    prompts = prompts_for(model, 5)
    engine = LocalEngine(model, dtype="bfloat16", device=GPU, graphs=True, max_requests=5)
    want = engine.generate(prompts, 40)
    [rank] = engine.ranks
    captures = rank.pool.num_captures

    @torch.inference_mode()
    def disturb(step: int) -> None:
        if step == 20:
            rank.cache.generation += 1
            for layer in rank.cache.layers:  # whatever lies in block 0 reaches nobody
                layer.k[0] = float("nan")
                layer.v[0] = float("nan")
            for state in rank.states.layers if rank.states else ():  # nor in state 0
                state.conv[0] = float("nan")
                state.state[0] = float("nan")

    got = engine.generate(prompts, 40, before_step=disturb)
    assert [answer.token_ids for answer in got] == [answer.token_ids for answer in want]
    assert rank.pool.num_captures > captures
    torch.cuda.synchronize()
    before = [x.clone() for layer in rank.cache.layers for x in (layer.k, layer.v)]
    ones = torch.ones(4, engine.config.hidden_size, dtype=torch.bfloat16, device=GPU)
    with torch.inference_mode():
        for _ in range(3):
            rank.pool.run("probe", 1, lambda: rank.model.norm(ones))
    after = (x for layer in rank.cache.layers for x in (layer.k, layer.v))
    for mine, theirs in zip(after, before, strict=True):
        assert torch.equal(mine.view(torch.int16), theirs.view(torch.int16))


@pytest.mark.parametrize(
    ("name", "num_drafts"), [("llama-untied-1003", 0), ("qwen3.5-moe", 0), ("qwen3.5", 3)]
)
@torch.inference_mode()
def test_captured_anew_amid_answers_what_is_live_keeps_its_bytes(
    name: str, num_drafts: int, tmp_path: Path
) -> None:
    """Around every capture, of steps with live requests; and before every step scratch is NaN."""
    write_checkpoint(name, tmp_path, mtp=num_drafts > 0)
    prompts = prompts_for(tmp_path, 5)
    options = {"dtype": "bfloat16", "device": GPU, "num_drafts": num_drafts, "max_requests": 6}
    want = LocalEngine(tmp_path, **options).generate(prompts, 40)
    engine = LocalEngine(tmp_path, graphs=True, **options)
    [rank] = engine.ranks
    capture, num_checked = rank.pool._capture, 0

    def checked(*piece: Any) -> Any:
        nonlocal num_checked
        torch.cuda.synchronize()
        before = live_bytes(rank)
        captured = capture(*piece)
        torch.cuda.synchronize()
        assert all(map(torch.equal, live_bytes(rank), before)), f"capture of {piece[0]}"
        num_checked += 1
        return captured

    rank.pool._capture = checked  # type: ignore[method-assign]
    owners: list[Any] = [rank.cache, rank.runner._slots]
    owners += [] if rank.states is None else [rank.states]

    def disturb(step: int) -> None:
        poison_scratch(rank)
        if step % 7 == 6:
            owners[step // 7 % len(owners)].generation += 1

    got = engine.generate(prompts, 40, before_step=disturb)
    assert [answer.token_ids for answer in got] == [answer.token_ids for answer in want]
    assert num_checked == rank.pool.num_captures > 8


@pytest.mark.parametrize("name", ["qwen3", "qwen3.5"])
def test_answers_are_those_of_requests_alone_in_batches_of_up_to_256(
    name: str, tmp_path: Path
) -> None:
    """Four more every third step: graphs of every size, exact and padded."""
    write_checkpoint(name, tmp_path)
    prompts = [random_ids(1 + 7 * i % 40, 199, seed=i) for i in range(256)]
    sizes = {"dtype": "bfloat16", "device": GPU, "max_model_len": 256}
    engine = LocalEngine(tmp_path, graphs=True, max_requests=256, num_blocks=1024, **sizes)
    arrivals = [3 * (i // 4) for i in range(256)]
    got = engine.generate(prompts, 200, arrivals)
    [rank] = engine.ranks
    heights = {key[0] for piece, key in rank.pool._graphs if piece == "tail"}
    assert heights == {*engine.graph_buckets} - {1, 2}
    assert rank.pool.num_replays > 400
    alone = LocalEngine(tmp_path, graphs=True, max_requests=1, **sizes)
    for i in (0, 3, 100, 201, 255):
        [want] = alone.generate([prompts[i]], 200)
        assert got[i].token_ids == want.token_ids, f"prompt {i}"
    eager = LocalEngine(tmp_path, max_requests=256, num_blocks=1024, **sizes)
    for mine, theirs in zip(got, eager.generate(prompts, 200, arrivals), strict=True):
        assert mine.token_ids == theirs.token_ids


@pytest.mark.parametrize("name", ["qwen3-moe", "qwen3.5-moe"])
def test_random_padding_changes_no_answer(name: str, tmp_path: Path) -> None:
    write_checkpoint(name, tmp_path)
    prompts = prompts_for(tmp_path, 5)
    options = {"dtype": "bfloat16", "device": GPU, "graphs": True, "graph_buckets": (11,)}
    want = LocalEngine(tmp_path, max_requests=11, **options).generate(prompts, 30)
    engine = LocalEngine(tmp_path, max_requests=11, random_padding=True, **options)
    seen = Counter[int]()
    forward = engine.ranks[0].model.forward

    def watched(batch: ForwardBatch, caches: Caches) -> torch.Tensor:
        if not torch.cuda.is_current_stream_capturing():
            seen.update(batch.token_ids.tolist())
        return forward(batch, caches)

    engine.ranks[0].model.forward = watched  # type: ignore[method-assign]
    got = engine.generate(prompts, 30)
    assert [answer.token_ids for answer in got] == [answer.token_ids for answer in want]
    assert engine.ranks[0].pool.num_replays > 20
    asked = {token for prompt in prompts for token in prompt}
    answered = {token for answer in got for token in answer.token_ids}
    assert len({*seen} - asked - answered) >= 3, "ids that nobody but padding has"


def test_switched_off_nothing_is_captured(model: Path) -> None:
    engine = LocalEngine(model, device=GPU)
    engine.generate(prompts_for(model, 2), 8)
    pool = engine.ranks[0].pool
    assert pool.num_captures == pool.num_replays == 0
    assert {reason for _, reason in pool.eager_runs} == {"eager"}


@pytest.mark.parametrize("name", sorted({*REFERENCES} - NEED_THE_HOST))
def test_a_reference_that_needs_no_host_is_captured_too(name: str, tmp_path: Path) -> None:
    write_checkpoint("qwen3.5-moe", tmp_path)
    prompts = prompts_for(tmp_path, 3)

    def ops_of(_: int, ops: Ops) -> Ops:
        return with_references(ops, [name])

    options = {"dtype": "bfloat16", "device": GPU, "ops_of": ops_of}
    want = LocalEngine(tmp_path, **options).generate(prompts, 12)
    engine = LocalEngine(tmp_path, graphs=True, **options)
    got = engine.generate(prompts, 12)
    assert [answer.token_ids for answer in got] == [answer.token_ids for answer in want]
    assert engine.ranks[0].pool.num_replays > 0


@pytest.mark.parametrize("is_alone", [True, False], ids=["alone", "beside others"])
@pytest.mark.parametrize("failure", [RuntimeError("planted"), KeyboardInterrupt(), None], ids=str)
def test_a_failed_capture_changes_nothing_and_is_recorded_again(
    failure: BaseException | None, is_alone: bool
) -> None:
    """A fault, a Ctrl-C, and (None) memory that is full, behind half of the body's work."""
    pool = GraphPool(GPU, solo_group(), [])
    x = torch.zeros(1 << 20, device=GPU)

    def body(*, whole: bool = True) -> torch.Tensor:
        x.copy_(x + 1)
        if not whole and failure is not None:
            raise failure
        if not whole:
            torch.empty(1 << 50, dtype=torch.uint8, device=GPU)
        return x * 2

    if not is_alone:
        for _ in range(2):
            pool.run("probe", "other", body)
    before = x.clone()
    pool.run("probe", 1, body)
    for _ in range(2):
        with pytest.raises(torch.OutOfMemoryError if failure is None else type(failure)):
            pool.run("probe", 1, lambda: body(whole=False))
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        assert torch.equal(x, before + 1)
    for count in (2, 3):
        out = pool.run("probe", 1, body)
        assert torch.equal(x, before + count)
        assert torch.equal(out, 2 * x)
    if not is_alone:
        pool.run("probe", "other", body)
        assert torch.equal(x, before + 4)
    assert pool.num_captures == 1 + (not is_alone)


def test_garbage_with_graphs_in_it_spoils_no_capture() -> None:
    """Of a former pool that is gone but for a cycle, with a collector as eager as can be."""
    x = torch.zeros(1 << 10, device=GPU)
    former, pool = (GraphPool(GPU, solo_group(), []) for _ in range(2))
    for _ in range(2):
        former.run("probe", 1, lambda: x + 1)
        pool.run("probe", 0, lambda: x + 1)
    cycle: list[object] = [former]
    cycle.append(cycle)

    def body() -> torch.Tensor:
        nonlocal cycle, former
        del cycle, former
        kept = [[i] for i in range(100)]
        return x + len(kept)

    thresholds = gc.get_threshold()
    pool.run("probe", 1, lambda: x + 100)
    gc.set_threshold(1, 1, 1)
    try:
        out = pool.run("probe", 1, body)
    finally:
        gc.set_threshold(*thresholds)
    assert torch.equal(out, x + 100)


def test_steps_beyond_the_buckets_run_eagerly_and_say_so(model: Path) -> None:
    prompts = prompts_for(model, 11)
    options = {"dtype": "bfloat16", "device": GPU, "max_requests": 11}
    arrivals = [2 * i for i in range(len(prompts))]
    want = LocalEngine(model, **options).generate(prompts, 30, arrivals)
    engine = LocalEngine(model, graphs=True, graph_buckets=(2, 6), **options)
    got = engine.generate(prompts, 30, arrivals)
    assert [answer.token_ids for answer in got] == [answer.token_ids for answer in want]
    [rank] = engine.ranks
    assert {key[0] for piece, key in rank.pool._graphs if piece == "tail"} == {2, 6}
    beyond = {piece for piece, reason in rank.pool.eager_runs if reason.startswith("more rows")}
    assert beyond == {"forward", "tail"}


def test_short_prompts_are_replayed_and_change_nothing(model: Path) -> None:
    """The same prompts again and again, of one step and of several, beside rows that decode."""
    options: dict[str, Any] = {"dtype": "bfloat16", "device": GPU, "max_step_tokens": 192}
    prompts = [random_ids(length, 199, seed=length) for length in (1, 40, 64, 100, 17, 90, 5, 120)]
    arrivals = [0, 0, 1, 2, 3, 3, 5, 6]
    want = LocalEngine(model, **options).generate(prompts, 8, arrivals)
    engine = LocalEngine(model, graphs=True, **options)
    pool = engine.ranks[0].pool
    for _ in range(3):
        got = engine.generate(prompts, 8, arrivals)
        assert [answer.token_ids for answer in got] == [answer.token_ids for answer in want]
    assert any(isinstance(key, Layout) for _, key in pool._graphs)
    assert not pool.eager_runs["forward", "prompt tokens"], "the host launched what a graph could"


@torch.inference_mode()
def test_capture_at_the_start_writes_to_scratch_only(model: Path) -> None:
    """B29, amid it all: what is live keeps its bytes, and every bucket has its graph."""
    engine = LocalEngine(
        model, dtype="bfloat16", device=GPU, graphs=True, max_requests=5, max_model_len=600
    )
    prompts = prompts_for(model, 5)
    want = engine.generate(prompts, 30)
    [rank] = engine.ranks
    rank.pool.drop()
    live = live_bytes(rank)
    config = WorkerConfig(
        model_path="m",
        model=engine.config,
        max_model_len=600,
        graph_buckets=engine.graph_buckets,
        capture="start",
    )
    captures, replays = rank.pool.num_captures, rank.pool.num_replays
    for _ in range(2):
        capture_graphs(config, rank.runner, rank.pool)
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(live_bytes(rank), live, strict=True))
    assert rank.pool.num_captures - captures == 4 * len(engine.graph_buckets)
    assert rank.pool.num_replays == replays
    rank.pool.eager_runs.clear()
    got = engine.generate(prompts, 30)
    assert [answer.token_ids for answer in got] == [answer.token_ids for answer in want]
    assert {run for run in rank.pool.eager_runs if run[1] != "prompt tokens"} <= {
        ("forward", "first run")
    }
    decoding = [key for _, key in rank.pool._graphs if not isinstance(key, Layout)]
    assert len(decoding) == 4 * len(engine.graph_buckets)


@torch.inference_mode()
def test_memory_that_was_taken_anew_has_graphs_of_its_own(model: Path) -> None:
    """B23, B25: KV and states at other addresses and of another size, nobody told the pool."""
    engine = LocalEngine(model, dtype="bfloat16", device=GPU, graphs=True, max_requests=5)
    prompts = prompts_for(model, 5)
    want = [answer.token_ids for answer in engine.generate(prompts, 30)]
    [rank] = engine.ranks
    for more in (0, 9):
        captures = rank.pool.num_captures
        held = [(layer.k, layer.v) for layer in rank.cache.layers]  # so that none comes back here
        rank.cache.allocate(64 + more)
        if rank.states is not None:
            rank.states.allocate(len(rank.states._tensors[0][0]) - 1 + more)
        assert [answer.token_ids for answer in engine.generate(prompts, 30)] == want
        assert rank.pool.num_captures > captures
        del held


def test_other_weights_answer_as_a_fresh_engine_with_them(model: Path, tmp_path: Path) -> None:
    """B25: graphs of 1, 2 and 4 rows were captured with the old ones. Then the old ones again."""
    name = max((name for name in MODELS if model.name.startswith(name)), key=len)
    write_checkpoint(name, tmp_path, 1)
    options = {"dtype": "bfloat16", "device": GPU, "max_requests": 4}
    prompts = prompts_for(model, 7)

    def answers(engine: LocalEngine) -> list[list[int]]:
        groups = (prompts[:1], prompts[1:3], prompts[3:])
        return [answer.token_ids for part in groups for answer in engine.generate(part, 20)]

    want, other = answers(LocalEngine(model, **options)), answers(LocalEngine(tmp_path, **options))
    assert want != other
    engine = LocalEngine(model, graphs=True, **options)
    assert [answers(engine) for _ in range(2)] == [want] * 2
    for path, expected in ((tmp_path, other), (model, want)):
        engine.reload(path)
        assert [answers(engine) for _ in range(2)] == [expected] * 2
    tails = {key[0] for piece, key in engine.ranks[0].pool._graphs if piece == "tail"}
    assert tails == {1, 2, 4}
