"""`LLM` with real ranks: streams, coroutines and stop strings give the answers of `generate`."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.end_to_end.command import json_lines, run
from unisono import LLM, SamplingParams
from unisono.models.config import ConfigError

MODEL = "tiny-mtp"
PROMPTS = ("def read(self, path):", "class Reader:")
SHORT = SamplingParams(max_tokens=12)
LONG = SamplingParams(max_tokens=200, ignore_eos=True)


async def read(llm: LLM, prompt: str) -> tuple[str, str]:
    async with llm.astream(prompt, SHORT) as stream:
        text = "".join([piece.text async for piece in stream])
        assert stream.answer is not None
        return text, stream.answer.digest


async def cancelled(llm: LLM) -> None:
    task = asyncio.create_task(llm.agenerate(["Once upon a time", "In the end"], LONG))
    await asyncio.sleep(0.2)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.fixture(scope="module")
def llm() -> Iterator[LLM]:
    with LLM(MODEL, max_model_len=256) as llm:
        yield llm


def test_every_way_to_ask_gives_the_same_answer(llm: LLM) -> None:
    alone = [llm.generate(prompt, SHORT)[0] for prompt in PROMPTS]

    async def together() -> list[tuple[str, str]]:
        [*streams, _] = await asyncio.gather(
            *(read(llm, prompt) for prompt in PROMPTS), cancelled(llm)
        )
        return streams

    assert asyncio.run(together()) == [(each.text, each.digest) for each in alone]

    stop = alone[0].text[8:12]
    with llm.stream(PROMPTS[0], SamplingParams(max_tokens=12, stop=(stop,))) as stream:
        text = "".join(piece.text for piece in stream)
    answer = stream.answer
    assert answer is not None
    assert text == answer.text == alone[0].text.partition(stop)[0]
    assert answer.finish_reason == "stop"
    count = len(answer.token_ids)
    assert answer.token_ids == alone[0].token_ids[:count]
    assert 0 < answer.first_token_s <= answer.total_s
    assert answer.token_s > 0 or count == 1


def test_cached_tokens_are_told_also_where_a_stop_string_ends_the_answer(llm: LLM) -> None:
    prompt = "The sea is wide and deep. " * 20
    [first] = llm.generate(prompt, SHORT)
    [again] = llm.generate(prompt, SHORT)
    cut = SamplingParams(max_tokens=12, stop=(first.text[2:6],))
    with llm.stream(prompt, cut, priority=3) as stream:
        assert list(stream)
    with pytest.raises(ConfigError, match=r"--priority 4294967296: must be at least"):
        llm.generate(prompt, SHORT, priority=2**32)
    shared = (first.num_prompt_tokens - 1) // 64 * 64
    assert shared > 0
    assert (first.num_cached_tokens, again.num_cached_tokens) == (0, shared)
    assert again.digest == first.digest
    assert stream.answer is not None
    assert stream.answer.num_cached_tokens == shared


def test_lower_priority_goes_first(tmp_path: Path) -> None:
    lines = [{"prompt": "The sea is", "priority": -1}, {"prompt": "The sea is"}]
    lines += [{"prompt": "The sea is", "priority": each} for each in (5, 1)]
    file = tmp_path / "prompts.jsonl"
    file.write_text("\n".join(map(json.dumps, lines)))
    out, _ = run(
        *("generate", MODEL, "--raw", "--json", "--prompts-file", str(file), "--priority", "9"),
        *("--max-requests", "1", "--max-tokens", "8", "--max-model-len", "64"),
    )
    answers = json_lines(out)
    # The first holds the only place while the others come. Each time counts from the request's own
    # arrival, so it says nothing of the first; of the others, who came later and ended earlier is
    # less.
    ended = sorted((1, 2, 3), key=lambda index: answers[index]["timing"]["total_s"])
    assert ended == [3, 2, 1]
    assert len({tuple(answer["token_ids"]) for answer in answers}) == 1
    assert [answer["usage"]["cached_tokens"] for answer in answers] == [0] * 4
