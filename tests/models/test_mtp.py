"""The MTP layer against transformers' own, on tiny random checkpoints, and ranks against ranks."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.closeness import assert_close, assert_same_bits
from tests.copying import write_copying_mtp
from tests.models.draft_rig import DraftingRank, on_ranks
from tests.rig import CPU
from tests.tiny import DRAFTING, add_tensors, oracle_mtp, random_ids, write_checkpoint
from unisono.models.config_reader import read_model_config
from unisono.models.interface import Build
from unisono.models.partition import ModelPartition
from unisono.models.registry import model_class
from unisono.ops import dispatch
from unisono.ops.comm import solo_group
from unisono.ops.table import Ops

ORACLE = 1e-5
"""Relative rms of fp32 states and logits against transformers: the same sums in another order."""
RANKS = 5e-6
"""Relative rms between rank counts: only the split of row-parallel sums differs."""
CHAIN = 3


@pytest.fixture(scope="module", params=DRAFTING)
def saved(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Any]:
    directory = tmp_path_factory.mktemp("drafting")
    return directory, write_checkpoint(request.param, directory, mtp=True)


@torch.no_grad()
def oracle(model: Any, mtp: Any, ids: list[int]) -> tuple[Tensor, list[int], Tensor]:
    """States of all pairs, CHAIN drafts behind the last one, and their logits."""
    from transformers.cache_utils import MtpCache

    hidden = model.model(torch.tensor([ids])).last_hidden_state
    cache = MtpCache(config=model.config.get_mtp_config())
    # A pair has the position of its token there; here that of its state. Only distances count.
    positions = torch.arange(1, len(ids))[None]
    tokens = torch.tensor([ids[1:]])
    states = hidden = mtp.forward_layer(0, hidden[:, :-1], positions, cache, input_ids=tokens)
    drafts, rows = [], []
    for i in range(CHAIN):
        if i:
            place, token = torch.tensor([[len(ids) - 1 + i]]), torch.tensor([drafts[-1:]])
            hidden = mtp.forward_layer(0, hidden[:, -1:], place, cache, input_ids=token)
        rows.append(mtp.shared_head(hidden[0, -1:]))
        drafts.append(int(rows[-1].argmax()))
    return states[0], drafts, torch.cat(rows)


def test_pairs_and_chains_equal_transformers_and_ranks_each_other(saved: tuple[Path, Any]) -> None:
    """B52: of states, logits and choices."""
    path, model = saved
    ids = random_ids(100, model.config.vocab_size)
    states, drafts, logits = oracle(model, oracle_mtp(model), ids)

    def ours(rank: DraftingRank) -> tuple[Tensor, list[int], Tensor]:
        hidden = rank.forward(ids)[:-1]
        return rank.draft(ids[1:], hidden), *rank.chain(ids, hidden, CHAIN)

    alone = on_ranks(path, 1, ours)[0]
    assert_close("states", alone[0], states, ORACLE)
    assert_close("draft logits", alone[2], logits, ORACLE)
    assert alone[1] == drafts
    for ranks in (2, 3, 4):
        for rank, (cut, cut_drafts, cut_logits) in enumerate(on_ranks(path, ranks, ours)):
            assert_close(f"states of {rank} of {ranks}", cut, alone[0], RANKS)
            assert_close(f"draft logits of {rank} of {ranks}", cut_logits, alone[2], RANKS)
            assert cut_drafts == drafts


@pytest.mark.parametrize("own", [("embed_tokens",), ("lm_head",), ("embed_tokens", "lm_head")])
def test_an_embedding_and_a_head_of_its_own(own: tuple[str, ...], tmp_path: Path) -> None:
    """B49: each is bound by its key, beside a model whose embedding is its head."""
    model = write_checkpoint("qwen3.5", tmp_path, mtp=True)
    ids, shape = random_ids(70, model.config.vocab_size), model.lm_head.weight.shape
    torch.manual_seed(3)
    tables = {name: torch.randn(shape) / 4 for name in own}
    add_tensors(tmp_path, {f"mtp.{name}.weight": table for name, table in tables.items()})
    config = read_model_config(tmp_path)
    assert config.tie_word_embeddings
    assert (config.mtp_embedding, config.mtp_head) == ("embed_tokens" in own, "lm_head" in own)
    mtp = oracle_mtp(model)
    if config.mtp_embedding:
        mtp.embed_tokens = torch.nn.Embedding.from_pretrained(tables["embed_tokens"])
    if config.mtp_head:
        mtp.shared_head = torch.nn.Linear(*shape[::-1], bias=False)
        mtp.shared_head.weight = torch.nn.Parameter(tables["lm_head"])
    states, drafts, logits = oracle(model, mtp, ids)

    def ours(rank: DraftingRank) -> tuple[Tensor, list[int], Tensor]:
        hidden = rank.forward(ids)[:-1]
        return rank.draft(ids[1:], hidden), *rank.chain(ids, hidden, CHAIN)

    for ranks in (1, 3):
        for ours_states, ours_drafts, ours_logits in on_ranks(tmp_path, ranks, ours):
            assert_close("states", ours_states, states, ORACLE)
            assert_close("draft logits", ours_logits, logits, ORACLE)
            assert ours_drafts == drafts


def test_a_head_of_its_own_that_is_the_models_too_drafts_the_same(tmp_path: Path) -> None:
    """B49."""
    path, ids = tmp_path / "model", random_ids(20)
    model = write_checkpoint("qwen3-next", path, mtp=True)

    def run(rank: DraftingRank) -> Tensor:
        return rank.chain(ids, rank.forward(ids)[:-1], CHAIN)[1]

    [shared] = on_ranks(path, 1, run)
    add_tensors(path, {"mtp.lm_head.weight": model.lm_head.weight.detach()})
    assert read_model_config(path).mtp_head
    [own] = on_ranks(path, 1, run)
    assert_same_bits("draft logits", own, shared)


def test_the_names_are_those_that_transformers_reads(saved: tuple[Path, Any]) -> None:
    from transformers.modeling_layers import MtpModel

    path, model = saved
    model.config.name_or_path, model.config.dtype = str(path), torch.float32
    read = MtpModel.from_pretrained(model)
    want = dict(oracle_mtp(model).named_parameters())
    for name, tensor in read.named_parameters():
        assert_same_bits(name, tensor.detach(), want[name].detach())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_pairs_have_the_same_bits_in_pieces(saved: tuple[Path, Any], dtype: torch.dtype) -> None:
    path, model = saved
    ids = random_ids(100, model.config.vocab_size)

    def run(rank: DraftingRank) -> None:
        hidden = rank.forward(ids)[:-1]
        whole = rank.draft(ids[1:], hidden)
        for cuts in ([0, 1, 2, 64, 99], [0, 37, 98, 99]):
            pieces = [
                rank.draft(ids[1 + a : 1 + b], hidden[a:b], a) for a, b in itertools.pairwise(cuts)
            ]
            assert_same_bits("states", torch.cat(pieces), whole)

    on_ranks(path, 1, run, dtype)


def test_bf16_stays_near_fp32(saved: tuple[Path, Any]) -> None:
    """bf16 keeps 8 bits: an error of 2^-8 a rounding, some tens of roundings deep."""
    path, model = saved
    ids = random_ids(60, model.config.vocab_size)

    def run(rank: DraftingRank) -> Tensor:
        return rank.draft(ids[1:], rank.forward(ids)[:-1])

    wide, narrow = (on_ranks(path, 1, run, dtype)[0] for dtype in (torch.float32, torch.bfloat16))
    assert narrow.dtype == torch.bfloat16
    assert_close("states", narrow, wide, 0.06)


def test_random_weights_draft_alike_on_every_rank_count(saved: tuple[Path, Any]) -> None:
    config, ids = read_model_config(saved[0]), random_ids(40)

    def run(rank: DraftingRank) -> Tensor:
        return rank.chain(ids, rank.forward(ids)[:-1], CHAIN)[1]

    alone = on_ranks(config, 1, run)[0]
    assert float(alone.std()) > 0.1
    for logits in on_ranks(config, 3, run):
        assert_close("draft logits", logits, alone, RANKS)


def test_drafting_is_watched_under_names_of_its_own(saved: tuple[Path, Any]) -> None:
    """Embedding and head are the model's, which keep theirs."""
    heard: list[str] = []

    def tap(ops: Ops, scope: str) -> Ops:
        watched = {
            name: _heard(getattr(ops, name), scope, heard)
            for name in ("rms_norm", "add_rms_norm", "paged_attention", "embed_shard")
        }
        return replace(ops, pack_linear=_heard(ops.pack_linear, scope, heard), **watched)

    rank, ids = DraftingRank(saved[0], solo_group(), tap=tap), random_ids(9)
    packed = {scope for scope in heard if scope.startswith("mtp.")}
    layer = "mtp.layers.0."
    assert {"mtp.fc", layer + "attention.qkv", layer + "attention.out"} <= packed
    heard.clear()
    hidden = rank.forward(ids)
    assert heard
    assert not any(scope.startswith("mtp") for scope in heard)
    heard.clear()
    rank.model.draft_logits(rank.draft(ids[1:], hidden[:-1]))
    assert heard == [
        "embed",
        "mtp.embedding_norm",
        "mtp.hidden_norm",
        layer + "input_norm",
        layer + "attention",
        layer + "mlp_norm",
        "mtp.norm",
    ]


def test_without_drafts_there_is_no_mtp_layer(saved: tuple[Path, Any]) -> None:
    config = read_model_config(saved[0])
    assert config.num_mtp_layers == 1
    build = Build(dispatch.resolve(CPU, config.head_dim), solo_group(), torch.float32, CPU)
    for asked, model in ((False, config), (True, replace(config, num_mtp_layers=0))):
        partition = ModelPartition.of(model, 1, drafts=asked)
        plain = model_class(config.family)(build, partition, 128)
        assert plain.mtp is None
        assert not any(name.startswith("mtp.") for name in plain.targets())


def _heard(op: Callable[..., Any], scope: str, heard: list[str]) -> Callable[..., Any]:
    def watched(*args: Any, **kwargs: Any) -> Any:
        heard.append(scope)
        return op(*args, **kwargs)

    return watched


@pytest.mark.parametrize("silent", [False, True])
@pytest.mark.parametrize("name", DRAFTING)
def test_a_layer_made_to_copy_drafts_every_answer(name: str, silent: bool, tmp_path: Path) -> None:
    wrong = range(5, 199, 6)
    copying = write_copying_mtp(name, tmp_path, wrong=wrong, silent=silent)
    prompt = random_ids(70)

    def run(rank: DraftingRank) -> None:
        other = rank.forward([prompt[0] + 1, *prompt[1:]])
        hidden, answer = rank.forward(prompt), []
        # All that was read counts, but for which token is the likeliest; nothing where silent.
        assert torch.equal(other[-1], hidden[-1]) == silent
        for i in range(16):
            logits = rank.whole(rank.model.logits(hidden[-1:]))
            answer.append(int(logits.argmax()))
            drafts, rows = rank.chain([*prompt, *answer], hidden, 8)
            count = copying.num_right(answer[-1], 8)
            want = copying.answer(answer[-1], 8)
            assert drafts[:count] == want[:count]
            assert drafts[count : count + 1] != want[count : count + 1] or count == 8
            new = rank.forward(answer[-1:], len(prompt) + i)
            hidden = torch.cat((hidden, new))
            if silent and count:
                after = rank.whole(rank.model.logits(new))
                assert_close("draft logits", rows[:1], after, 1e-5)
        assert answer == copying.answer(prompt[-1], 16)

    on_ranks(tmp_path, 2, run)
