"""`LLM` with real ranks: streams, coroutines and stop strings give the answers of `generate`."""

from __future__ import annotations

import asyncio

import pytest

from unisono import LLM, SamplingParams

PROMPTS = ("The sea is", "One, two, three,")
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


def test_every_way_to_ask_gives_the_same_answer() -> None:
    with LLM("demo", max_model_len=256) as llm:
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
