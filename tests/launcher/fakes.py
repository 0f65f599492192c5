"""A front door without ranks: checkpoints of zeros, a byte tokenizer, an engine that echoes."""

from __future__ import annotations

import codecs
import json
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from unisono.launcher.config import LaunchConfig
from unisono.launcher.model_source import ModelSource
from unisono.models.config import ModelConfig, RopeConfig
from unisono.models.config_reader import read_model_config
from unisono.models.partition import ModelPartition
from unisono.runtime.protocol import (
    Delta,
    EngineReady,
    EngineState,
    Finished,
    Order,
    Rejected,
    Reload,
    SamplingParams,
    Sleep,
    Starting,
    Tokens,
    Wake,
    WorkerLost,
)

Event = Delta | Tokens | Finished | Rejected

CONFIG = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 300,
    "hidden_size": 36,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "max_position_embeddings": 128,
    "tie_word_embeddings": False,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "dtype": "bfloat16",
}
EOS = 257


def tiny_model(**changes: Any) -> ModelConfig:
    fields = {
        "family": "llama",
        "vocab_size": 300,
        "hidden_size": 36,
        "intermediate_size": 64,
        "num_layers": 2,
        "num_heads": 9,
        "num_kv_heads": 3,
        "head_dim": 4,
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 128,
        "rope": RopeConfig(rotary_dim=4),
        "dtype": "bfloat16",
    }
    return ModelConfig(**{**fields, **changes})


def write_checkpoint(directory: Path, **changes: Any) -> Path:
    """Write a config and the right tensors, all zero, as one sparse safetensors file."""
    directory.mkdir(exist_ok=True)
    (directory / "config.json").write_text(json.dumps({**CONFIG, **changes}))
    model = read_model_config(directory)
    header, end = {}, 0
    for spec in ModelPartition.of(model, 1).weights(0):
        start, end = end, end + 2 * spec.num_elements
        header[spec.name] = {"dtype": "BF16", "shape": spec.shape, "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (directory / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)
    return directory


class FakeDetokenizer:
    def __init__(self) -> None:
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, ids: Iterable[int]) -> str:
        return self._utf8.decode(bytes(token for token in ids if token < 256))

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class FakeTokenizer:
    """One token a byte; ids from 256 on are special and say nothing."""

    size = 300
    eos_ids = (EOS,)

    def __init__(self, chat: bool = True) -> None:
        self.has_chat_template = chat

    @classmethod
    def load(cls, source: ModelSource) -> FakeTokenizer:
        return cls(chat=not (source.path / "no_template").exists())

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def chat_ids(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        turns = [f"<{turn['role']}>{turn['content']}" for turn in messages]
        return self.encode("".join(turns) + "<assistant>")

    def stream(self) -> FakeDetokenizer:
        return FakeDetokenizer()

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id]) if token_id < 256 else b"<%d>" % token_id


def logprob_items(token_ids: Sequence[int], num_top: int | None, start: int) -> array[int] | None:
    """As on the wire: the token at place p has -p / 8 and rank p + 1; ids 0, 1, ... are likeliest.

    The last of three or more likeliest ids is missing, as where a vocabulary has no more.
    """
    if num_top is None:
        return None
    items = array("i")
    for place in range(start, start + len(token_ids)):
        items += _bits(-place / 8)
        items.append(place + 1)
        for token in range(num_top):
            items.append(token if token < 2 else -1)
            items += _bits(-token - 0.5)
    return items


def _bits(value: float) -> array[int]:
    return array("i", array("f", [value]).tobytes())


TOOK = (("steps in flight", 0.25), ("giving memory back", 1.5), ("the rest", 0.001))
"""What a `FakeEngine` says that it took to obey."""


class FakeEngine:
    """Answers a prompt with its own bytes in capitals, one token an event, requests in turn.

    A prompt that contains "reject" is rejected, one that contains "die" loses rank 1. Asleep it
    answers nothing. Weights named "torn" cannot be loaded, and "deadly" ones lose rank 1. What
    happens is in `log`; `made` holds every engine that was started.
    """

    made: list[FakeEngine]

    def __init__(self, config: LaunchConfig, cluster: object = None) -> None:
        self.config, self.cluster = config, cluster
        self.log: list[str] = []
        self.params: list[SamplingParams] = []
        self.priorities: list[int] = []
        self.aborted: list[int] = []
        self._queues: dict[int, deque[Event]] = {}
        self._next_id = 100
        self.ordered: list[Order] = []
        self.states: deque[EngineState] = deque()
        self._level = 0
        self.made.append(self)

    def __enter__(self) -> FakeEngine:
        self.log.append("enter")
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, on_progress: Callable[[Starting], None]) -> EngineReady:
        self.log.append("start")
        worker = self.config.runtime.worker
        for rank in range(worker.tp):
            on_progress(Starting(rank=rank, phase="loading", done=50, total=100))
        return EngineReady(
            num_blocks=8,
            block_size=64,
            device=worker.device,
            dtype=worker.dtype,
            rank_pids=array("i", range(worker.tp)),
        )

    def submit(self, prompt_ids: Sequence[int], params: SamplingParams, priority: int = 0) -> int:
        self.params.append(params)
        self.priorities.append(priority)
        self._next_id += 1
        self._queues[self._next_id] = deque(self._events(self._next_id, prompt_ids, params))
        return self._next_id

    def abort(self, request_id: int) -> None:
        assert "close" not in self.log, "abort after close"
        self.aborted.append(request_id)

    def order(self, wanted: Order) -> None:
        self.ordered.append(wanted)
        error = ""
        match wanted:
            case Sleep(level=level):
                self._level = max(self._level, level)
            case Wake():
                self._level = 0
            case Reload(path=path):
                if path.endswith("deadly"):
                    raise WorkerLost("rank 1 died in phase 'reload weights'")
                error = "rank 1: torn" if path.endswith("torn") else ""
        level = self._level
        state = EngineState(level=level, error=error, took=TOOK)
        self.states.append(state)

    def poll(self, timeout_s: float) -> list[Event]:
        """As a runtime does: what are only tokens behind the first comes at once for all."""
        if self._level:
            return []
        events = [queue.popleft() for queue in self._queues.values() if queue]
        if any(isinstance(event, Finished) and event.reason == "die" for event in events):
            raise WorkerLost("rank 1 failed in step 3: KilledBySignal: SIGKILL")
        tokens = [event for event in events if isinstance(event, Tokens)]
        # An id that nobody waits for: a late word about an aborted request.
        late = Delta(request_id=7, token_ids=array("i", [65]))
        together = Tokens(
            request_ids=sum((each.request_ids for each in tokens), array("q", [7])),
            token_ids=sum((each.token_ids for each in tokens), array("i", [65])),
        )
        return [late, together, *(event for event in events if not isinstance(event, Tokens))]

    def close(self) -> None:
        self.log.append("close")

    def _events(
        self, request_id: int, prompt_ids: Sequence[int], params: SamplingParams
    ) -> Iterable[Event]:
        text = bytes(token for token in prompt_ids if token < 256).decode()
        text = text.removesuffix("<assistant>").rpartition(">")[2]
        if "reject" in text:
            yield Rejected(request_id=request_id, message="needs 9 blocks, there are 8")
            return
        answer = [*text.upper().encode(), EOS][: params.max_tokens]
        of_prompt = logprob_items(prompt_ids[1:], params.prompt_logprobs, 1)
        for place, token in enumerate(answer):
            if place and params.logprobs is None:
                yield Tokens(request_ids=array("q", [request_id]), token_ids=array("i", [token]))
                continue
            yield Delta(
                request_id=request_id,
                token_ids=array("i", [token]),
                logprobs=logprob_items([token], params.logprobs, place),
                prompt_logprobs=None if place else of_prompt,
            )
        reason = "stop" if answer[-1] == EOS else "length"
        yield Finished(
            request_id=request_id,
            reason="die" if "die" in text else reason,
            num_prompt_tokens=len(prompt_ids),
            num_tokens=len(answer),
            first_token_s=0.5,
            total_s=0.5 + 0.1 * (len(answer) - 1),
        )
