"""`unisono inspect`: its numbers against a count by hand, its page within 100 columns."""

from __future__ import annotations

import io
import json
import sys

import pytest
import torch

from tests.launcher.fakes import tiny_model, write_checkpoint
from tests.tiny import add_tensors, write_wrapper
from unisono.launcher import cli
from unisono.launcher.inspect import WIDTH, _runs, _size, plain_lines
from unisono.launcher.inspect_report import CARDS, make_report
from unisono.models.config import ModelConfig, RopeConfig
from unisono.models.partition import ModelPartition
from unisono.models.shapes import SHAPES


@pytest.fixture
def model(tmp_path, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    return write_checkpoint(tmp_path / "model")


@pytest.fixture
def inspect(model, capsys):
    def call(*arguments):
        code = cli.run(["inspect", str(model), *arguments])
        out, err = capsys.readouterr()
        return code, out, err

    return call


def report_of(config: ModelConfig, ranks: int, dtype: str = "bfloat16", max_model_len: int = 128):
    return make_report(
        "m", ModelPartition.of(config, ranks), dtype=dtype, max_model_len=max_model_len
    )


def count_by_hand(heads: int, kv: int, mlp: int, vocab: int, layers: int = 2) -> int:
    """Weights of a rank of the tiny model: hidden 36, head_dim 4, head and embedding apart."""
    attention = 36 * 4 * (heads + 2 * kv) + 36 * 4 * heads
    return 2 * vocab * 36 + layers * (attention + 3 * 36 * mlp + 2 * 36) + 36


def test_shares_of_an_uneven_cut():
    report = report_of(tiny_model(), 2)
    first, second = report.ranks
    assert (first.query_heads, second.query_heads) == ((0, 6), (6, 9))
    assert (first.kv_heads, second.kv_heads) == ((0, 2), (2, 3))
    assert not first.kv_replicated
    assert (first.mlp_channels, second.mlp_channels) == ((0, 32), (32, 64))
    assert (first.vocab_rows, second.vocab_rows) == ((0, 192), (192, 300))
    assert first.weight_bytes == 2 * count_by_hand(6, 2, 32, 192)
    assert second.weight_bytes == 2 * count_by_hand(3, 1, 32, 108)
    assert report.weight_bytes == first.weight_bytes + second.weight_bytes
    # Keys and values, two layers, four channels, two bytes.
    assert (first.kv_bytes_per_token, second.kv_bytes_per_token) == (2 * 64 // 2, 32)
    assert report.kv_bytes_per_token == 96
    assert report.kv_bytes_of_max_model_len == 96 * 128


def test_replicated_kv_heads_are_marked():
    report = report_of(tiny_model(), 4)
    assert [share.kv_replicated for share in report.ranks] == [True, True, False, False]
    text = "\n".join(plain_lines(report))
    assert "0-1 (1)*" in text
    assert "*: also on another rank" in text
    assert "*" not in "\n".join(plain_lines(report_of(tiny_model(), 3)))


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("tied", [True, False])
def test_the_ceiling_is_bandwidth_over_what_the_fullest_rank_reads(ranks, tied):
    config = tiny_model(tie_word_embeddings=tied)
    report = report_of(config, ranks, "float32")
    table = (
        0 if tied else max(stop - start for start, stop in [report.ranks[0].vocab_rows]) * 36 * 4
    )
    share = report.ranks[0]
    read = share.weight_bytes - table + share.kv_bytes_per_token * 128
    assert share.streamed_bytes == read == max(each.streamed_bytes for each in report.ranks)
    for card, ceiling in zip(CARDS, report.ceilings, strict=True):
        assert ceiling["tokens_per_s"] == pytest.approx(card.bandwidth_tb_s * 1e12 / read)


def test_an_even_cut_is_bandwidth_times_ranks_over_all_bytes():
    config = tiny_model(num_heads=8, num_kv_heads=4, vocab_size=256)
    report = report_of(config, 2)
    total = sum(share.streamed_bytes for share in report.ranks)
    assert report.ceilings[0]["tokens_per_s"] == pytest.approx(2 * 4.8e12 / total)


def test_a_model_of_known_size():
    """Qwen3-8B: 8.19 billion parameters, 144 KiB of KV a token in bfloat16."""
    config = ModelConfig(
        family="qwen3",
        vocab_size=151936,
        hidden_size=4096,
        intermediate_size=12288,
        num_layers=36,
        num_heads=32,
        num_kv_heads=8,
        head_dim=128,
        rms_norm_eps=1e-6,
        max_position_embeddings=40960,
        rope=RopeConfig(rotary_dim=128, theta=1e6),
        qk_norm=True,
        dtype="bfloat16",
    )
    report = report_of(config, 1, max_model_len=40960)
    assert report.weight_bytes == 2 * 8_190_735_360
    assert report.kv_bytes_per_token == 144 * 1024
    assert report.context_tokens == 1024
    # 15.1 GB of weights and 0.15 GB of KV a token.
    assert report.ranks[0].streamed_bytes == pytest.approx(15.29e9, rel=1e-3)


def test_eight_ranks_are_planned():
    """Qwen3-8B: a KV head each and an eighth of all but norms, which every rank has whole."""
    config = SHAPES["qwen3-8b"]
    report = report_of(config, 8, max_model_len=4096)
    whole = report_of(config, 1, max_model_len=4096)
    assert [share.kv_heads for share in report.ranks] == [(rank, rank + 1) for rank in range(8)]
    assert [share.query_heads for share in report.ranks] == [(4 * r, 4 * r + 4) for r in range(8)]
    assert {share.kv_bytes_per_token for share in report.ranks} == {36 * 2 * 128 * 2}
    norms = 2 * (36 * (2 * 4096 + 2 * 128) + 4096)
    assert report.weight_bytes == whole.weight_bytes + 7 * norms
    fullest = max(share.weight_bytes for share in report.ranks)
    assert fullest < whole.weight_bytes / 8 * 1.002
    assert report.ceilings[0]["tokens_per_s"] > 7.9 * whole.ceilings[0]["tokens_per_s"]


def test_a_hybrid_of_known_size():
    """Qwen3-Next-80B-A3B: 36 delta nets of 48 layers, 10 of 512 experts a token."""
    config = SHAPES["qwen3-next-80b-a3b"]
    report = report_of(config, 1, max_model_len=262144)
    share = report.ranks[0]
    specs = list(ModelPartition.of(config, 1).weights(0))
    wide = sum(spec.num_elements for spec in specs if spec.keeps_fp32)
    assert report.weight_bytes == 2 * 79_674_391_296 + 2 * wide
    # 12 layers, keys and values, 2 heads of 256, two bytes.
    assert report.kv_bytes_per_token == 12 * 2 * 2 * 256 * 2
    # 3 inputs of the convolution in two bytes; 32 states of 128 x 128 in four.
    state = 36 * (3 * (2 * 16 + 32) * 128 * 2 + 32 * 128 * 128 * 4)
    assert report.state_bytes_per_request == share.state_bytes_per_request == state
    experts = 48 * 512 * 3 * 2048 * 512 * 2
    table = 151936 * 2048 * 2
    context = 1024 * report.kv_bytes_per_token
    read = report.weight_bytes - table - experts + experts * 10 // 512
    assert share.streamed_bytes == read + context + 2 * state
    facts = report.facts
    assert (facts["attention_layers"], facts["delta_layers"], facts["expert_layers"]) == (
        12,
        36,
        48,
    )
    assert facts["delta"]["num_value_heads"] == 32
    assert facts["experts"]["shared_width"] == 512


@pytest.mark.parametrize(
    ("name", "words"),
    [
        (
            "qwen3-next-80b-a3b",
            (
                "48 layers (36 gated delta nets, 12 attention), hidden 2,048\n",
                "32 value heads of 128, 16 key heads of 128, convolution over 4 tokens",
                "10 of 512 a token, each of 512 channels, and one of 512 for all; in 48 layers",
                "state               73.7 MiB a request, of any length",
                "rank  key heads  value heads  state/request  expert channels  shared expert",
                "1      8-16 (8)   16-32 (16)       36.8 MiB    256-512 (256)  256-512 (256)",
            ),
        ),
        (
            "qwen3-30b-a3b",
            (
                "48 layers, hidden 2,048\n",
                "8 of 128 a token, each of 768 channels; in 48 layers",
                "rank  expert channels\n0         0-384 (384)",
            ),
        ),
        ("qwen3.5-27b", ("48 gated delta nets, 16 attention), hidden 5,120, MLP 17,408",)),
    ],
)
def test_the_page_says_what_a_hybrid_is_made_of(name, words):
    text = "\n".join(plain_lines(report_of(SHAPES[name], 2, max_model_len=4096)))
    for each in words:
        assert each in text
    assert ("delta nets  " in text) == SHAPES[name].is_hybrid
    assert ("experts  " in text) == (SHAPES[name].experts is not None)


def test_others_have_no_line_about_it():
    text = "\n".join(plain_lines(report_of(tiny_model(), 2)))
    for word in ("delta", "expert", "state", "MTP"):
        assert word not in text


def test_what_drafting_would_take():
    config = SHAPES["qwen3-next-80b-a3b"]
    for ranks in (1, 2):
        report = report_of(config, ranks, max_model_len=4096)
        parts = [ModelPartition.of(config, ranks, drafts=True).weights(r) for r in range(ranks)]
        mtp = [spec for part in parts for spec in part if spec.name.startswith("mtp.")]
        assert report.draft_weight_bytes == sum(spec.nbytes(2) for spec in mtp) > 2**31
        assert report.draft_kv_bytes_per_token == 2 * 2 * 256 * 2
        partition = ModelPartition.of(config, ranks, drafts=True)
        drafting = make_report("m", partition, dtype="bfloat16", max_model_len=4096)
        assert drafting.weight_bytes == report.weight_bytes + report.draft_weight_bytes
        assert drafting.kv_bytes_per_token == 13 * report.draft_kv_bytes_per_token
    line = "MTP layers          1; drafting takes 3.09 GiB more of weights and 2.00 KiB more of KV"
    assert f"{line} a token" in plain_lines(report)
    report = report_of(tiny_model(), 1)
    assert (report.draft_weight_bytes, report.draft_kv_bytes_per_token) == (0, 0)


BIG = {
    "vocab_size": 262144,
    "hidden_size": 8192,
    "intermediate_size": 131072,
    "num_layers": 126,
    "num_heads": 144,
    "num_kv_heads": 9,
    "head_dim": 128,
    "max_position_embeddings": 1_048_576,
}


@pytest.mark.parametrize("ranks", [1, 4, 9])
@pytest.mark.parametrize("big", [False, True])
def test_the_page_fits_100_columns(ranks, big):
    assert_fits(tiny_model(**BIG) if big else tiny_model(), ranks)


@pytest.mark.parametrize(
    ("name", "ranks"),
    [
        *(("qwen3.5-27b", ranks) for ranks in (1, 3, 16)),
        *(("qwen3.5-35b-a3b", ranks) for ranks in (1, 16)),
        *(("qwen3-next-80b-a3b", ranks) for ranks in (1, 3)),
    ],
)
def test_the_page_of_a_hybrid_fits_too(name, ranks):
    assert_fits(SHAPES[name], ranks)


def assert_fits(config: ModelConfig, ranks: int) -> None:
    lines = plain_lines(report_of(config, ranks, max_model_len=config.max_position_embeddings))
    assert max(map(len, lines)) <= WIDTH


def test_the_command_prints_plain_text_into_a_pipe(inspect):
    code, out, err = inspect("--tp", "2")
    assert (code, err) == (0, "")
    assert "9 query heads, 3 KV heads, head_dim 4" in out
    assert "dtype               float32" in out
    assert "legal rank counts   1-9\n" in out
    assert "vendor specification" in out


def test_the_json_has_the_same_numbers(inspect):
    code, out, err = inspect("--tp", "3", "--dtype", "bfloat16", "--max-model-len", "100", "--json")
    report = json.loads(out)
    assert (code, err, out.count("\n")) == (0, "", 1)
    assert (report["tp"], report["dtype"], report["max_model_len"]) == (3, "bfloat16", 100)
    assert [rank["query_heads"] for rank in report["ranks"]] == [[0, 3], [3, 6], [6, 9]]
    assert report["legal_rank_counts"] == list(range(1, 10))
    assert report["kv_bytes_of_max_model_len"] == 96 * 100
    assert report["facts"]["context_length"] == 128


def test_what_is_ignored_is_counted_by_prefix(capsys, tmp_path):
    """Not what a rank reads where it drafts, which has a line of its own."""
    write_wrapper("qwen3.5", tmp_path, mtp=True)
    further = {f"mtp.layers.1.{name}.weight": torch.zeros(1) for name in "ab"}
    add_tensors(tmp_path, {**further, "model.rotary_emb.inv_freq": torch.zeros(1)})
    assert cli.run(["inspect", str(tmp_path), "--json"]) == 0
    groups = json.loads(capsys.readouterr().out)["ignored"]
    count = groups["model.visual."]
    assert groups == {"model.visual.": count, "mtp.": 2, "*.rotary_emb.inv_freq": 1}
    assert count > 9
    said = f"{count} tensors under model.visual., 2 under mtp., 1 named *.rotary_emb.inv_freq"
    assert cli.run(["inspect", str(tmp_path)]) == 0
    assert f"\nignored             {said}\n" in capsys.readouterr().out


def test_a_terminal_gets_tables(model, monkeypatch):
    class Screen(io.StringIO):
        def isatty(self) -> bool:
            return True

    screen = Screen()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setenv("COLUMNS", "100")
    assert cli.run(["inspect", str(model)]) == 0
    assert "query heads" in screen.getvalue()
    assert "━" in screen.getvalue()


def test_a_config_without_weights_can_be_inspected(inspect, model):
    (model / "model.safetensors").unlink()
    assert inspect()[0] == 0


def test_weights_of_another_model_are_an_error(inspect, model):
    text = (model / "config.json").read_text()
    (model / "config.json").write_text(text.replace('"vocab_size": 300', '"vocab_size": 301'))
    code, out, err = inspect()
    assert (code, out) == (2, "")
    assert "has shape [300, 36], the configuration says [301, 36]" in err


def test_narrow_states_are_counted_as_such(capsys):
    """Qwen3.5-27B: 48 delta nets of 48 states of 128 x 128, three inputs of 10,240 channels."""
    seen = {}
    for dtype, item in (("float32", 4), ("bfloat16", 2)):
        arguments = ["--dtype", "bfloat16", "--state-dtype", dtype, "--json"]
        assert cli.run(["inspect", "shape:qwen3.5-27b", *arguments]) == 0
        report = seen[dtype] = json.loads(capsys.readouterr().out)
        state = 48 * (48 * 128 * 128 * item + 3 * 10240 * 2)
        assert report["state_bytes_per_request"] == state
    [wide], [narrow] = seen["float32"]["ranks"], seen["bfloat16"]["ranks"]
    assert wide["streamed_bytes"] - narrow["streamed_bytes"] == 2 * 48 * 48 * 128 * 128 * 2


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--tp", "10"], "tp=10: 9 query heads in 3 groups"),
        (["--max-model-len", "129"], "--max-model-len 129: the model's limit is 128 tokens"),
        (["--dtype", "int4"], "--dtype int4: choose auto"),
        (["--state-dtype", "bfloat16"], "--state-dtype bfloat16: is for models with a recurrent"),
    ],
    ids=" ".join,
)
def test_refusals(inspect, arguments, message):
    code, out, err = inspect(*arguments)
    assert (code, out) == (2, "")
    assert err.startswith(f"unisono: error: {message}")


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (15 * 1024, "15.0 KiB"),
        (2**30, "1.00 GiB"),
    ],
)
def test_sizes(count, text):
    assert _size(count) == text


def test_runs():
    assert _runs([1, 2, 3, 6, 8, 9]) == "1-3, 6, 8-9"
    assert _runs([1]) == "1"
