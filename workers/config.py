"""What a worker is told before it starts. Frozen; nothing is written back. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass

from unisono.models.config import ModelConfig

BLOCK_SIZE = 64
"""Tokens in one KV block; also the key tile of attention (ops/attention.py)."""
MOST_REQUESTS = 65_536  # at the same time: far more than memory has room for
DTYPES = ("auto", "float32", "bfloat16", "float16")
LOAD_FORMATS = ("auto", "random")
DEVICES = ("auto", "cpu", "cuda")
ATTENTIONS = ("auto", "triton", "torch-flash", "reference")
NUMERICS = ("exact", "fast")
STATE_DTYPES = ("float32", "bfloat16")
COLLECTIVES = ("auto", "symmetric", "nccl")
SPECULATE = ("off", "auto", *map(str, range(1, 9)))
AUTO_DRAFTS = 3
"""The most that --speculate auto drafts."""
CHOICES = {
    "dtype": DTYPES,
    "device": DEVICES,
    "attn": ATTENTIONS,
    "numerics": NUMERICS,
    "collectives": COLLECTIVES,
    "load_format": LOAD_FORMATS,
    "state_dtype": STATE_DTYPES,
    "speculate": SPECULATE,
    "accept": ("coupled", "rejection"),
    "capture": ("lazy", "start"),
}
"""The legal values of fields of `WorkerConfig`."""
HOST_SHARE, CARD_SHARE = 0.25, 0.9
"""What --memory-utilization is unless the user says: on the CPU, on a GPU."""
SERVED_DEVICES = ("cpu", "cuda")
"""Device types that `ops/dispatch.py` has ops for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerConfig:
    """One rank's orders, the same on every rank."""

    model_path: str
    """A checkpoint directory or a GGUF file; or the name of a shape, where no file is read."""
    model: ModelConfig
    tp: int = 1
    """Tensor-parallel ranks: one worker process each."""
    dtype: str = "auto"
    """Activations and weights: float32, bfloat16 or float16, also called fp32, bf16 and fp16;
    auto: the checkpoint's own on a GPU, float32 on the CPU."""
    device: str = "auto"
    """cpu or cuda; auto: cuda where a GPU is visible and torch is built for it."""
    attn: str = "auto"
    """How attention is computed. auto: by our own kernels: triton on a GPU, fixed tiles on the CPU.
    reference: by the formula, one query at a time, to compare with; slow. torch-flash: by torch's
    flash attention on a GPU, whose bits differ between prompts and decoding: with --numerics fast
    only."""
    numerics: str = "exact"
    """exact: whatever would make an answer depend on its company is refused. fast: it is permitted;
    today that is --attn torch-flash."""
    collectives: str = "auto"
    """How ranks on GPUs exchange numbers; the answers are the same. auto: through memory that each
    reaches at the others, up to some MB, where the GPUs of one host allow it, else by NCCL alone.
    symmetric: the same, or not at all. nccl: by NCCL alone."""
    load_format: str = "auto"
    """Where weights come from: auto: the files, or random ones for a shape; random: the config of
    MODEL, whose weight files may be missing, and random weights, the same on every machine."""
    overlay: str = ""
    """Parts of the model that get random values, such as bias=random,norm=random,qk-norm=random:
    trained biases are often zero and norms one, which hides faults."""
    max_model_len: int = 0
    """Most tokens of one request, prompt and answer together; 0: what the model was made for."""
    max_requests: int = 32
    """Requests that run at the same time."""
    kv_tokens: int = 0
    """Tokens the KV cache holds; 0: what --max-requests can fill, within --memory-utilization."""
    memory_utilization: float = 0.0
    """Share of memory to use. On the CPU: for the KV caches of all ranks, of what is free once
    the weights are loaded; 0: 0.25. On a GPU: for weights, activations and KV cache, of the whole
    card; 0: 0.9."""
    state_slots: int = 0
    """Recurrent states, of hybrid models only: one for each request at a time, and what is left
    over for snapshots, from which cached prefixes go on. 0: one and one for a snapshot for each of
    --max-requests, within half of --memory-utilization; fewer requests run where fewer fit."""
    state_dtype: str = "float32"
    """What recurrent states are kept in between tokens, in hybrid models only. bfloat16 takes half
    of the memory and rounds after every token, on every path alike."""
    speculate: str = "off"
    """Tokens to draft behind each one with the layer that the model has for it (MTP), and to check
    in one step. The answers are the same. auto: up to 3, fewer or none where that is faster."""
    accept: str = "coupled"
    """Which drafts of drawn tokens are right. coupled: those that the model draws with their noise,
    so that the answers are the same. rejection: of requests without a seed more, by rejection
    sampling: their answers are as likely as they were, and depend on the drafts."""
    no_graphs: bool = False
    """On a GPU: launch every kernel of a step by itself, instead of replaying a captured graph of
    them. The answers are the same; CUDA graphs are only faster."""
    graph_buckets: tuple[int, ...] = ()
    """Rows that graphs are captured for, ascending, on a GPU: a step takes the next larger number,
    and runs eagerly if it has more rows than the last. Unset: 1, 2, 4, 8, then every 8, from 32 on
    every 16, from 128 on every 32, up to --max-requests."""
    capture: str = "lazy"
    """When graphs are captured. lazy: where their size is wanted the second time. start: before the
    first request, for all --graph-buckets and up to 512 tokens, which takes seconds."""
    random_padding: bool = False
    """On a GPU: rows that fill a step up to a graph's size compute random tokens, so that they do
    not all want the same experts. The answers are the same."""
    num_token_ids: int = 0
    """Ids the tokenizer knows; later ones are never chosen. 0: the whole vocabulary."""
    trace_dir: str = ""
    """Where every rank records what its ops return (workers/tracer.py); empty: nowhere."""
    trace_values: tuple[str, ...] = ()
    """What is recorded as numbers, too: ops, each everywhere ("rms_norm") or in one place."""
    reference_ops: tuple[str, ...] = ()
    """Ops that are computed by their references (ops/by_reference.py), to find out which one is at
    fault."""
    forced_acceptance: float = 0.0
    """Which part of the drafts is taken for right whatever the model says (workers/speculator.py):
    to time drafts of random weights. 0: none. The answers are nobody's then."""

    @property
    def num_drafts(self) -> int:
        """The most tokens that are drafted behind one."""
        most = {"off": 0, "auto": AUTO_DRAFTS}.get(self.speculate)
        return int(self.speculate) if most is None else most
