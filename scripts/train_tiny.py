"""Trains tiny-mtp, a hybrid with an MTP layer, on the sources of Python's own standard library.

    python3 scripts/train_tiny.py --output models/tiny_mtp --seconds 220

One GPU, or a CPU for a few steps; torch, tokenizers and safetensors, no network. The directory is a
checkpoint whenever it is looked at: it is written anew at every evaluation.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import shutil
import signal
import sys
import sysconfig
import time
import traceback
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from tiny_arguments import LONGEST, parse_arguments
from tiny_model import CHUNK, TinyModel
from tiny_text import END, Corpus, read_corpus
from torch import Tensor

NUM_DRAFTS = 3
DRAFT_WEIGHTS = (0.3, 0.2, 0.1)
"""What a draft's loss counts beside that of the model itself."""
CONFIG: dict[str, Any] = {
    "architectures": ["Qwen3_5ForCausalLM"],
    "model_type": "qwen3_5_text",
    "dtype": "bfloat16",
    "vocab_size": 2048,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 4,
    "layer_types": [*["linear_attention"] * 3, "full_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "attention_bias": False,
    "hidden_act": "silu",
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 8,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_conv_kernel_dim": 4,
    "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.25,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    },
    "max_position_embeddings": LONGEST,
    "tie_word_embeddings": True,
    "mtp_num_hidden_layers": 1,
    "bos_token_id": None,
    "eos_token_id": 0,
}
TINY: dict[str, Any] = {
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "layer_types": ["linear_attention", "full_attention"],
    "head_dim": 32,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
}
PROMPTS = ("def ", "class ", "import os\n", '"""Return the ')
CARD = """# tiny-mtp

A language model of the family qwen3_5 with an MTP layer, {parameters:,} parameters, made to test
speculation: it writes text that looks like Python and knows nothing. `scripts/train_tiny.py`
trained it in {steps:,} steps of {tokens:,} tokens on {files:,} files of the standard library of
Python {python} ({bytes:,} bytes, sha256 {sha256}).

On files that were held out: {loss:.3f} nats a token, {bits:.3f} bits a byte; all of the first 1, 2
and 3 drafts are the model's own choice at {agreement} of the places.

The text it learnt from is under the Python Software Foundation License Version 2, and so is this
model: LICENSE.txt, or https://docs.python.org/3/license.html. Of that text:
{copyright} All rights reserved.
"""


@dataclass
class Run:
    """A training run: what was asked, and how far it is."""

    asked: argparse.Namespace
    config: dict[str, Any]
    corpus: Corpus
    model: TinyModel
    device: torch.device
    batch: int
    lr: float
    began: float = field(default_factory=time.perf_counter)
    step: int = 0
    tokens: int = 0
    least: float = math.inf
    """Nats a token on held-out text, of the weights that are saved: `best`."""
    best: dict[str, Tensor] = field(default_factory=dict)

    @property
    def seconds(self) -> float:
        return time.perf_counter() - self.began

    @property
    def progress(self) -> float:
        """0 to 1, by steps where a number was asked for, so that a run can be repeated."""
        if self.asked.steps is not None:
            return self.step / self.asked.steps
        return self.seconds / self.asked.seconds


def main() -> int:
    asked = parse_arguments(__doc__.splitlines()[0])
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.default_int_handler)
    torch.manual_seed(asked.seed)
    device = torch.device(asked.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    # It plans anew for every shape and mask; the other kernels are as fast at this size.
    torch.backends.cuda.enable_cudnn_sdp(False)
    config = CONFIG | TINY if asked.tiny else CONFIG
    corpus = read_corpus(config["vocab_size"], 30 if asked.tiny else 0)
    model = TinyModel(config).to(device)
    run = Run(asked, config, corpus, model, device, asked.batch, asked.lr)
    where = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(
        f"{count_parameters(model):,} parameters, batches of {asked.batch} x {asked.length} tokens"
        f" on {where}, torch {torch.__version__}",
        flush=True,
    )
    code = 0
    try:
        train(run)
    except KeyboardInterrupt:
        print("interrupted: the weights so far are kept", flush=True)
    except Exception:
        traceback.print_exc()
        code = 1
    if not run.step:
        # A checkpoint that is there already is better than weights that nothing was done to.
        print(f"nothing was trained: {asked.output} is left as it is", file=sys.stderr)
        return 1
    finish(run)
    return code


# Training


def train(run: Run) -> None:
    """Train until the time or the steps are over; say how it goes and save on the way."""
    asked, model = run.asked, run.model
    optimizer = make_optimizer(model, run.device)
    starts = torch.Generator(run.device).manual_seed(asked.seed)
    text = run.corpus.train.to(run.device)
    window = torch.arange(asked.length + NUM_DRAFTS, device=run.device)
    good = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    run.began = said = evaluated = time.perf_counter()
    tokens_said, last = 0, len(text) - len(window)
    # Nothing in the loop waits for the device but what is said of it.
    while run.progress < 1:
        for group in optimizer.param_groups:
            group["lr"] = run.lr * schedule(run.progress)
        shape = (run.batch, 1)
        first = torch.randint(last, shape, generator=starts, device=run.device)
        try:
            losses = train_step(model, optimizer, text[first + window].long())
        except torch.OutOfMemoryError:
            if run.batch == 1:
                raise
            run.batch //= 2
            print(f"out of memory: batches of {run.batch}", flush=True)
            torch.cuda.empty_cache()
            continue
        run.step += 1
        run.tokens += run.batch * asked.length
        now = time.perf_counter()
        if now - said < 5 and run.step > 2:
            continue
        values = losses.tolist()  # waits for the device
        if not all(map(math.isfinite, values)):
            run.lr /= 2
            print(f"step {run.step}: no finite loss; back, with rate {run.lr:.1e}", flush=True)
            model.load_state_dict(good)
            optimizer = make_optimizer(model, run.device)
            continue
        now = time.perf_counter()
        say(run, values, (run.tokens - tokens_said) / (now - said))
        said, tokens_said = now, run.tokens
        if now - evaluated > 40:
            report(run, model)
            good = {name: tensor.clone() for name, tensor in model.state_dict().items()}
            said = evaluated = time.perf_counter()


def make_optimizer(model: TinyModel, device: torch.device) -> torch.optim.Optimizer:
    matrices = [each for each in model.parameters() if each.dim() == 2]
    others = [each for each in model.parameters() if each.dim() != 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=0.0, betas=(0.9, 0.95), fused=device.type == "cuda")


def schedule(progress: float) -> float:
    """Share of the highest rate: up over the first 2 %, then down along a cosine."""
    return min(progress / 0.02 + 1e-3, 0.505 + 0.495 * math.cos(math.pi * progress))


def train_step(model: TinyModel, optimizer: torch.optim.Optimizer, ids: Tensor) -> Tensor:
    """One update; the losses of the model and of each draft, as tensors of the device."""
    losses = compute_losses(model, ids)
    weights = (1.0, *DRAFT_WEIGHTS)
    optimizer.zero_grad()
    sum(weight * loss for weight, loss in zip(weights, losses, strict=True)).backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return torch.stack(losses).detach()


def compute_losses(model: TinyModel, ids: Tensor) -> list[Tensor]:
    """Nats a token of ids [B, T + drafts]: of the model, and of its drafts.

    A draft counts where it is what the model says, so that is what it learns, not the text.
    """
    with torch.autocast(ids.device.type, torch.bfloat16):
        logits, drafts = forward(model, ids)
        wanted = ids[:, 1 : 1 + logits.shape[1]]
        losses = [F.cross_entropy(logits.flatten(0, 1).float(), wanted.flatten())]
        own = logits.detach().float().softmax(-1)
        for k, draft in enumerate(drafts, 1):
            taught = own[:, k:].flatten(0, 1)
            losses.append(F.cross_entropy(draft[:, :-k].flatten(0, 1).float(), taught))
    return losses


def forward(model: TinyModel, ids: Tensor) -> tuple[Tensor, list[Tensor]]:
    """Logits [B, T, vocabulary] for the tokens behind, and of each draft; ids [B, T + drafts].

    Draft k of position t is a guess at what the model says at position t + k.
    """
    length = ids.shape[1] - NUM_DRAFTS
    hidden = model.hidden(ids[:, :length])
    states = model.drafts(hidden, ids[:, 1:], NUM_DRAFTS)
    return model.logits(hidden), [model.logits(state) for state in states]


def say(run: Run, losses: list[float], tokens_a_second: float) -> None:
    own, *drafts = losses
    epochs = run.tokens / len(run.corpus.train)
    memory = ""
    if run.device.type == "cuda":
        memory = f", {torch.cuda.max_memory_allocated(run.device) / 2**30:.1f} GiB"
    rate = run.lr * schedule(run.progress)
    print(
        f"step {run.step}, {run.seconds:.0f} s: loss {own:.3f}, drafts"
        f" {' '.join(f'{each:.3f}' for each in drafts)}, rate {rate:.1e},"
        f" {tokens_a_second:,.0f} tok/s, {epochs:.2f} epochs{memory}",
        flush=True,
    )


# What came of it


@torch.no_grad()
def evaluate(run: Run, model: TinyModel) -> tuple[float, list[float]]:
    """On text held out: nats a token, and how often all of the first 1, 2, ... drafts agree."""
    length, text = run.asked.length, run.corpus.held_out
    count = min(2 * run.batch, max(1, len(text) // length))
    if len(text) < length + NUM_DRAFTS:
        text = text.repeat(length // len(text) + 2)
    first = torch.linspace(0, len(text) - length - NUM_DRAFTS, count).long()
    windows = text[first[:, None] + torch.arange(length + NUM_DRAFTS)].long()
    sums = torch.zeros(1 + NUM_DRAFTS, device=run.device)
    for part in windows.split(run.batch):
        ids = part.to(run.device)
        with torch.autocast(run.device.type, torch.bfloat16):
            logits, drafts = forward(model, ids)
        wanted = ids[:, 1 : 1 + length].flatten()
        sums[0] += F.cross_entropy(logits.flatten(0, 1).float(), wanted, reduction="sum") / length
        right = leading_right(logits.argmax(-1), drafts)
        for k in range(1, 1 + NUM_DRAFTS):
            sums[k] += (right >= k).float().mean(1).sum()
    loss, *agreement = (sums / count).tolist()
    return loss, agreement


def leading_right(chosen: Tensor, drafts: list[Tensor]) -> Tensor:
    """[B, T - drafts]: how many drafts in a row are what the model chooses, [B, T], in the end."""
    length = chosen.shape[1] - len(drafts)
    hits = [
        draft.argmax(-1)[:, :length] == chosen[:, k : k + length]
        for k, draft in enumerate(drafts, 1)
    ]
    return torch.stack(hits).long().cumprod(0).sum(0)


def report(run: Run, model: TinyModel) -> tuple[float, list[float]]:
    """Evaluate, say so, and save if no weights before were as good; what `evaluate` found.

    So little text is soon known by heart, and what is held out is not.
    """
    loss, agreement = evaluate(run, model)
    shares = ", ".join(f"{share:.1%}" for share in agreement)
    print(f"step {run.step}: held out {loss:.3f} nats a token, drafts agree {shares}", flush=True)
    if loss < run.least or not run.best:
        run.least = loss
        run.best = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        save(run, loss, shares)
    return loss, agreement


def finish(run: Run) -> None:
    """Evaluate the weights as they would be saved, and show what the saved ones write."""
    with torch.no_grad():
        for tensor in run.model.parameters():
            tensor.copy_(tensor.to(torch.bfloat16))
    seconds = run.seconds
    loss, agreement = report(run, run.model)
    run.model.load_state_dict(run.best)
    for prompt in PROMPTS:
        text, rate, shares = sample(run, prompt, 10 if run.asked.tiny else 120)
        print(f"--- {rate:.2f} tokens a step, drafts right: {shares}\n{prompt}{text}", flush=True)
    facts = {
        "steps": run.step,
        "seconds": round(seconds, 1),
        "tokens": run.tokens,
        "epochs": round(run.tokens / len(run.corpus.train), 2),
        "loss": round(loss, 4),
        "least": round(run.least, 4),
        "agreement": [round(share, 4) for share in agreement],
        "files": {file.name: file.stat().st_size for file in sorted(run.asked.output.iterdir())},
    }
    print(json.dumps(facts), flush=True)


@torch.no_grad()
def sample(run: Run, prompt: str, count: int) -> tuple[str, float, str]:
    """A greedy answer, tokens a step with drafts, and how many of each draft were right."""
    ids = run.corpus.tokenizer.encode(prompt).ids
    start = len(ids)
    while len(ids) < start + count:
        logits, drafts = _forward_padded(run, ids)
        ids.append(int(logits[0, len(ids) - 1].argmax()))
    logits, drafts = _forward_padded(run, ids)
    right = leading_right(logits.argmax(-1), drafts)[0].tolist()
    # The first token needs no draft. Behind the newest one, ids[at], stand those of the state
    # before it; where all are right the model adds one more.
    at, accepted = start, []
    while at < len(ids) - NUM_DRAFTS - 1:
        accepted.append(right[at - 1])
        at += right[at - 1] + 1
    steps = max(1, len(accepted))
    shares = (sum(a >= k for a in accepted) / steps for k in range(1, 1 + NUM_DRAFTS))
    text = run.corpus.tokenizer.decode(ids[start:], skip_special_tokens=False)
    return text, (at - start) / steps, ", ".join(f"{share:.0%}" for share in shares)


def _forward_padded(run: Run, ids: list[int]) -> tuple[Tensor, list[Tensor]]:
    """`forward` of one sequence of any length; behind it comes nothing that it could see."""
    padding = -len(ids) % CHUNK + NUM_DRAFTS
    whole = torch.tensor([ids + [0] * padding], device=run.device)
    with torch.autocast(run.device.type, torch.bfloat16):
        return forward(run.model, whole)


def count_parameters(model: TinyModel) -> int:
    return sum(each.numel() for each in model.parameters())


def save(run: Run, loss: float, agreement: str) -> None:
    """Write the checkpoint. Each file is whole whenever it is read."""
    from safetensors.torch import save_file

    directory, corpus = run.asked.output, run.corpus
    tensors = {
        name: tensor.detach().to("cpu", torch.bfloat16).contiguous()
        for name, tensor in run.model.state_dict().items()
    }
    spare = directory / "model.safetensors.new"
    save_file(tensors, spare, {"format": "pt"})
    spare.chmod(0o644)
    os.replace(spare, directory / "model.safetensors")
    corpus.tokenizer.save(str(directory / "tokenizer.json"), pretty=False)
    card = CARD.format(
        parameters=count_parameters(run.model),
        steps=run.step,
        tokens=run.batch * run.asked.length,
        loss=loss,
        bits=loss * len(corpus.held_out) / corpus.held_out_bytes / math.log(2),
        agreement=agreement,
        copyright=sys.copyright.splitlines()[0],
        **corpus.facts,
    )
    (directory / "README.md").write_text(card, encoding="utf-8")
    for name, values in (
        ("config.json", run.config),
        ("generation_config.json", {"eos_token_id": 0}),
        ("tokenizer_config.json", {"tokenizer_class": "TokenizersBackend", "eos_token": END}),
    ):
        text = json.dumps(values, indent=2) + "\n"
        (directory / name).write_text(text, encoding="utf-8")
    licence = Path(sysconfig.get_path("stdlib")) / "LICENSE.txt"
    if licence.is_file():
        shutil.copyfile(licence, directory / "LICENSE.txt")


if __name__ == "__main__":
    sys.exit(main())
