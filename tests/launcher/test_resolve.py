"""What `auto` becomes, and what is refused before any process starts."""

from __future__ import annotations

import pytest

from tests.launcher.fakes import tiny_model, write_checkpoint
from unisono.launcher import resolve
from unisono.launcher.cluster import ClusterFacts
from unisono.launcher.resolve import (
    HostFacts,
    check_checkpoint,
    count_gpus,
    host_facts,
    prepare,
    resolve_config,
    with_tokenizer,
)
from unisono.models.config import ConfigError, DeltaConfig, RopeConfig
from unisono.models.headers import CheckpointError
from unisono.models.partition import ModelPartition, PartitionError

CPU = HostFacts(num_gpus=0, torch_has_cuda=False)
TWO_GPUS = HostFacts(num_gpus=2, torch_has_cuda=True, served=("cpu", "cuda"))
TWO_IDLE_GPUS = HostFacts(num_gpus=2, torch_has_cuda=True, served=("cpu",))
CLUSTER = ClusterFacts(
    launcher="torchrun",
    rank=0,
    world_size=2,
    local_rank=0,
    local_world_size=2,
    master_addr="127.0.0.1",
    master_port=29500,
)


def worker_of(options=(), *, host=CPU, cluster=None, **model):
    config = resolve_config(dict(options), "path", tiny_model(**model), host, cluster)
    return config.runtime.worker


@pytest.mark.parametrize(
    ("options", "host", "device", "dtype"),
    [
        ({}, CPU, "cpu", "float32"),
        ({}, TWO_GPUS, "cuda", "bfloat16"),
        ({"device": "cpu"}, TWO_GPUS, "cpu", "float32"),
        ({"device": "cuda"}, TWO_GPUS, "cuda", "bfloat16"),
        ({"dtype": "bfloat16"}, CPU, "cpu", "bfloat16"),
        ({"dtype": "float16"}, TWO_GPUS, "cuda", "float16"),
        # A GPU that the installed torch cannot use is no reason to fail.
        ({}, HostFacts(num_gpus=2, torch_has_cuda=False), "cpu", "float32"),
        ({}, TWO_IDLE_GPUS, "cpu", "float32"),
    ],
    ids=str,
)
def test_device_and_dtype(options, host, device, dtype):
    worker = worker_of(options, host=host)
    assert (worker.device, worker.dtype) == (device, dtype)


def test_max_model_len_zero_is_the_models_limit():
    assert worker_of().max_model_len == 128
    assert worker_of({"max_model_len": 128}).max_model_len == 128
    rope = RopeConfig(rope_type="linear", rotary_dim=4, factor=4.0)
    assert worker_of(rope=rope).max_model_len == 512


@pytest.mark.parametrize(
    ("options", "host", "most"),
    [
        ({}, CPU, 2048),
        ({}, TWO_GPUS, 8192),
        ({"device": "cpu"}, TWO_GPUS, 2048),
        ({"max_step_tokens": 0}, TWO_GPUS, 8192),
        ({"max_step_tokens": 500}, TWO_GPUS, 500),
    ],
    ids=str,
)
def test_steps_of_a_gpu_are_larger(options, host, most):
    config = resolve_config(options, "path", tiny_model(), host)
    assert config.runtime.max_step_tokens == most


def test_options_survive_and_the_rest_is_default():
    config = resolve_config(
        {"tp": 2, "log_level": "info", "max_step_tokens": 7}, "path", tiny_model(), CPU
    )
    assert (config.log_level, config.runtime.max_step_tokens) == ("info", 7)
    worker = config.runtime.worker
    assert (worker.tp, worker.model_path, worker.max_requests) == (2, "path", 32)


@pytest.mark.parametrize(
    ("options", "host", "message"),
    [
        ({"device": "cuda"}, CPU, "--device cuda: no GPU is visible here; choose cpu or auto"),
        (
            {"device": "cuda"},
            HostFacts(num_gpus=1, torch_has_cuda=False),
            "--device cuda: the installed torch is built without CUDA; choose cpu or auto",
        ),
        ({"tp": 3}, TWO_GPUS, "tp=3 on cuda: every rank needs a GPU and 2 are visible; choose"),
        ({"dtype": "float16"}, CPU, "--dtype float16: on cpu choose float32 or bfloat16"),
        (
            {"max_model_len": 129},
            CPU,
            "--max-model-len 129: the model's limit is 128 tokens; choose 2 to 128",
        ),
        ({"tp": 0}, CPU, "--tp 0: must be at least 1"),
        ({"kv_tokens": -1}, CPU, "--kv-tokens -1: must be at least 0"),
        ({"attn": "triton"}, CPU, "--attn triton: needs a GPU; on cpu choose auto or reference"),
        (
            {"attn": "torch-flash"},
            TWO_GPUS,
            "--attn torch-flash: --numerics exact refuses it, since a token has other bits decoded "
            "than in a prompt; choose --attn auto, triton or reference, or --numerics fast",
        ),
        (
            {"state_slots": 5},
            CPU,
            "--state-slots 5: is for models with a recurrent state, and llama keeps a KV cache",
        ),
        (
            {"state_dtype": "float32"},
            CPU,
            "--state-dtype float32: is for models with a recurrent state, and llama keeps a KV",
        ),
        (
            {"collectives": "nccl", "tp": 2},
            CPU,
            "--collectives nccl: needs GPUs, and ranks on cpu meet over gloo; choose auto",
        ),
        (
            {"collectives": "symmetric"},
            TWO_GPUS,
            "--collectives symmetric: one rank exchanges nothing; choose auto, or --tp 2 or more",
        ),
        ({"collectives": "gloo"}, CPU, "--collectives gloo: choose auto, symmetric or nccl"),
        ({"attn": "tiled"}, CPU, "--attn tiled: choose auto, triton, torch-flash or reference"),
    ],
    ids=str,
)
def test_refusals(options, host, message):
    with pytest.raises(ConfigError) as caught:
        worker_of(options, host=host)
    assert str(caught.value).startswith(message)
    assert "\n" not in str(caught.value)


def test_states_are_for_models_that_have_them():
    assert worker_of({"state_slots": 0}).state_slots == 0
    hybrid = {
        "delta": DeltaConfig(
            num_key_heads=1, num_value_heads=1, key_head_dim=4, value_head_dim=4, conv_width=2
        ),
        "delta_layers": (True, False),
    }
    worker = worker_of({"state_slots": 40, "state_dtype": "bfloat16"}, **hybrid)
    assert (worker.state_slots, worker.state_dtype) == (40, "bfloat16")
    assert worker_of({"state_slots": 5, "max_requests": 5}, **hybrid).state_slots == 5
    # The default of --max-requests gives way; what was asked for does not.
    assert worker_of({"state_slots": 5}, **hybrid).max_requests == 32
    with pytest.raises(ConfigError, match="--state-slots 4: each of --max-requests 5 needs a"):
        worker_of({"state_slots": 4, "max_requests": 5}, **hybrid)


def test_attention_is_the_devices_own_unless_asked_otherwise():
    assert worker_of().attn == "tiled"
    assert worker_of(host=TWO_GPUS).attn == "triton"
    for host in (CPU, TWO_GPUS):
        assert worker_of({"attn": "reference"}, host=host).attn == "reference"
    assert worker_of({"attn": "triton", "dtype": "float32"}, host=TWO_GPUS).attn == "triton"
    fast = worker_of({"attn": "torch-flash", "numerics": "fast"}, host=TWO_GPUS)
    assert (fast.attn, fast.numerics) == ("torch-flash", "fast")


@pytest.mark.parametrize("numerics", ["exact", "fast"])
@pytest.mark.parametrize(
    ("options", "model", "message"),
    [
        ({"device": "cpu"}, {}, "needs a GPU; on cpu choose auto or reference"),
        ({"dtype": "float32"}, {}, "serves no float32; choose --dtype bfloat16 or float16, or --a"),
        (
            {},
            {"sliding_windows": (0, 32)},
            "serves no sliding window, and this model has one of 32 tokens; choose --attn auto, ",
        ),
        ({}, {"head_dim": 264}, "serves heads of up to 256 channels, and this model's have 264; "),
    ],
    ids=str,
)
def test_torch_flash_is_refused_where_it_cannot_serve(options, model, message, numerics):
    options = {"attn": "torch-flash", "numerics": numerics, **options}
    with pytest.raises(ConfigError) as caught:
        worker_of(options, host=TWO_GPUS, **model)
    assert str(caught.value).startswith(f"--attn torch-flash: {message}")
    assert "\n" not in str(caught.value)


def test_an_illegal_rank_count_names_the_legal_ones():
    with pytest.raises(PartitionError, match=r"tp=10: .*legal rank counts: 1, 2, 3, 4, 5, 6, 7, 8"):
        worker_of({"tp": 10})


def test_tp_follows_the_cluster():
    assert worker_of(cluster=CLUSTER).tp == 2
    assert worker_of({"tp": 2}, cluster=CLUSTER).tp == 2
    with pytest.raises(ConfigError, match="tp=3: torchrun started 2 ranks"):
        worker_of({"tp": 3}, cluster=CLUSTER)
    with pytest.raises(ConfigError, match="tp=1: torchrun started 2 ranks"):
        worker_of({"tp": 1}, cluster=CLUSTER)


def test_each_host_of_a_cluster_needs_gpus_for_its_own_ranks():
    spread = ClusterFacts(
        launcher="srun",
        rank=0,
        world_size=3,
        local_rank=0,
        local_world_size=2,
        master_addr="node1",
        master_port=29500,
    )
    assert worker_of(host=TWO_GPUS, cluster=spread).device == "cuda"


@pytest.mark.parametrize(
    ("visible", "count"),
    [
        (None, 3),
        ("", 0),
        ("-1", 0),
        ("0", 1),
        ("2, 0", 2),
        ("0,-1,1", 1),
        ("0,3,1", 1),
        ("GPU-8932f937-d72c", 1),
        ("0,1,2,0", 3),
        ("none", 0),
        ("1,²", 1),
        ("0," + "1" * 4301, 1),
    ],
)
def test_count_gpus_reads_visible_devices_like_cuda(tmp_path, visible, count):
    for name in ("nvidia0", "nvidia1", "nvidia7", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
    assert count_gpus(environ, tmp_path) == count


@pytest.mark.parametrize(
    ("line", "has_cuda"), [("'12.8'", True), ('"13.0"', True), ("None", False)]
)
def test_torch_is_asked_through_its_version_file(tmp_path, monkeypatch, line, has_cuda):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise SystemExit('imported')")
    (tmp_path / "torch" / "version.py").write_text(f"cuda: Optional[str] = {line}\nhip = '6'\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(resolve.importlib.sys.modules, "torch", raising=False)
    assert host_facts({}).torch_has_cuda is has_cuda


def test_prepare_reads_config_and_headers(tmp_path):
    path = write_checkpoint(tmp_path / "model")
    prepared = prepare(str(path), {"tp": 2, "device": "cpu"}, {})
    worker = prepared.worker
    assert (prepared.source.path, worker.model_path) == (path, str(path))
    assert (worker.tp, worker.device, worker.dtype) == (2, "cpu", "float32")
    assert worker.model.num_heads == 9


def test_prepare_refuses_weights_that_do_not_fit_the_config(tmp_path):
    path = write_checkpoint(tmp_path / "model")
    text = (path / "config.json").read_text()
    (path / "config.json").write_text(
        text.replace('"num_hidden_layers": 2', '"num_hidden_layers": 3')
    )
    with pytest.raises(CheckpointError, match="missing"):
        prepare(str(path), {}, {})


def test_a_directory_without_weights_can_only_be_looked_at(tmp_path):
    path = write_checkpoint(tmp_path / "model")
    (path / "model.safetensors").unlink()
    partition = ModelPartition.of(tiny_model(), 1)
    check_checkpoint(path, partition, weights_required=False)
    with pytest.raises(CheckpointError):
        check_checkpoint(path, partition)


def test_the_tokenizer_adds_end_tokens_and_bounds_the_choice():
    config = resolve_config({}, "path", tiny_model(eos_token_ids=(2, 9)), CPU)
    worker = with_tokenizer(config, 290, [9, 5]).runtime.worker
    assert (worker.model.eos_token_ids, worker.num_token_ids) == ((2, 5, 9), 290)
    # A tokenizer may know more ids than the model has rows.
    assert with_tokenizer(config, 500, []).runtime.worker.num_token_ids == 300


def test_drafts_need_a_layer_that_makes_them() -> None:
    model = tiny_model()
    for speculate in ("1", "8", "auto"):
        with pytest.raises(ConfigError) as caught:
            worker_of({"speculate": speculate})
        assert str(caught.value) == (
            f"--speculate {speculate}: drafts come from a layer of the model's own (MTP), and this "
            "checkpoint has none; choose a model that has one, or off"
        )
    assert worker_of({"speculate": "off"}).num_drafts == 0
    drafting = {"num_mtp_layers": 1}
    assert worker_of({"speculate": "5"}, **drafting).num_drafts == 5
    # 0 is another word for off, and Python has numbers.
    assert worker_of({"speculate": "0"}) == worker_of({"speculate": 0}) == worker_of({})
    assert worker_of({"speculate": 5}, **drafting) == worker_of({"speculate": "5"}, **drafting)
    assert worker_of({"speculate": "auto"}, **drafting).num_drafts == 3
    with pytest.raises(ConfigError, match=r"--speculate 9: choose off, auto, 1, 2, .* or 8"):
        worker_of({"speculate": "9"}, **drafting)
    # B42: each number works (tests/test_speculation.py) or is refused, with the limit.
    for refused in ("00", "13", "-1", "none", 9, -1, 2.0, True):
        with pytest.raises(ConfigError, match=rf"--speculate {refused}: choose off, .* 7 or 8"):
            worker_of({"speculate": refused}, **drafting)
    assert model.num_mtp_layers == 0


def test_rejection_needs_drafts_to_reject() -> None:
    drafting = {"num_mtp_layers": 1}
    for speculate in ("1", "auto"):
        worker = worker_of({"accept": "rejection", "speculate": speculate}, **drafting)
        assert worker.accept == "rejection"
    assert worker_of({"accept": "coupled"}).accept == "coupled"
    for asked in ({}, {"speculate": "off"}):
        with pytest.raises(ConfigError) as caught:
            worker_of({"accept": "rejection", **asked}, **drafting)
        assert str(caught.value) == (
            "--accept rejection: judges drafts, and --speculate off makes none; choose coupled, or "
            "--speculate auto or 1 to 8"
        )
    with pytest.raises(ConfigError, match=r"--accept typical: choose coupled or rejection"):
        worker_of({"accept": "typical"}, **drafting)
