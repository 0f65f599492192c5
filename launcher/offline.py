"""`LLM`: a model in a script.

    from unisono import LLM, SamplingParams

    with LLM("demo", tp=2) as llm:
        [answer] = llm.generate("The capital of France is", SamplingParams(max_tokens=8))
        print(answer.text)

The ranks are processes of their own program, so a script needs no `__main__` guard.
"""

from __future__ import annotations

import os
import weakref
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

from unisono.launcher.answering import Answer, Request, answer_all, check_prompts
from unisono.launcher.cluster import detect_cluster
from unisono.launcher.engine_client import Engine
from unisono.launcher.options import check_sampling_params
from unisono.launcher.resolve import prepare, with_tokenizer
from unisono.launcher.tokenizer import Tokenizer
from unisono.models.config import ConfigError
from unisono.runtime.protocol import SamplingParams

__all__ = ["LLM", "Answer", "SamplingParams"]


class LLM:
    """A model on 1 to N ranks, used from a script. A context manager.

    Options are those of `unisono generate`, by field name: tp, dtype, device, max_model_len,
    max_requests, kv_tokens, max_step_tokens, no_prefix_cache, log_level, start_timeout_s,
    stop_grace_s; others are refused. The constructor checks everything a user can get wrong and
    raises ConfigError; the ranks start with the `with` block, or with the first prompt. Not for
    use by several threads.
    """

    def __init__(self, model: str, **options: Any) -> None:
        cluster = detect_cluster(os.environ)
        if cluster is not None and cluster.world_size > 1:
            raise ConfigError(
                f"LLM starts its own ranks, and {cluster.launcher} started this script "
                f"{cluster.world_size} times: run it alone with tp={cluster.world_size}, or use "
                "unisono generate"
            )
        prepared = prepare(model, options, os.environ)
        self._tokenizer = Tokenizer.load(prepared.source)
        self._config = with_tokenizer(
            prepared.launch, self._tokenizer.size, self._tokenizer.eos_ids
        )
        self._engine: Engine | None = None
        self._end: weakref.finalize[[], LLM] | None = None

    def __enter__(self) -> LLM:
        self._started()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def generate(
        self, prompts: str | Sequence[str], params: SamplingParams | None = None
    ) -> list[Answer]:
        """Continue each prompt as it is, without a chat template; answers in prompt order.

        Raises RequestRejected before anything is computed if a prompt is empty or too long, and
        ConfigError for illegal `params`. A prompt that the engine itself refuses gets an answer
        whose `finish_reason` is rejected.
        """
        texts = [prompts] if isinstance(prompts, str) else list(prompts)
        return self._answer([(text, self._tokenizer.encode(text)) for text in texts], params)

    def chat(
        self, messages: Sequence[Mapping[str, str]], params: SamplingParams | None = None
    ) -> Answer:
        """Answer one conversation through the model's chat template. Raises like `generate`."""
        if not self._tokenizer.has_chat_template:
            raise ConfigError("the model has no chat template: use generate()")
        if not messages:
            raise ConfigError("chat() needs at least one message")
        prompt_ids = self._tokenizer.chat_ids(messages)
        return self._answer([(messages[-1]["content"], prompt_ids)], params)[0]

    def close(self) -> None:
        """Stop the ranks. Safe to call twice; the next prompt starts them again."""
        if self._end is not None:
            self._end()
        self._engine = self._end = None

    def _answer(
        self, prompts: Sequence[tuple[str, Sequence[int]]], params: SamplingParams | None
    ) -> list[Answer]:
        worker = self._config.runtime.worker
        params = SamplingParams() if params is None else params
        check_sampling_params(params, worker.model)
        requests = [
            Request(index=index, prompt=prompt, prompt_ids=tuple(ids))
            for index, (prompt, ids) in enumerate(prompts)
        ]
        check_prompts(requests, worker)
        events = answer_all(self._started(), self._tokenizer, requests, params)
        answers = [event for event in events if isinstance(event, Answer)]
        return sorted(answers, key=lambda answer: answer.index)

    def _started(self) -> Engine:
        if self._engine is None:
            engine = Engine(self._config)
            engine.__enter__()
            # A script may end, or drop its LLM, without closing it.
            self._end = weakref.finalize(self, engine.close)
            self._engine = engine
            try:
                engine.start(lambda news: None)
            except BaseException:
                self.close()
                raise
        return self._engine
