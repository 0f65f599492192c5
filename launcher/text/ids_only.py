"""What stands in for the tokenizer of a model that has none: prompts and answers are token ids."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from unisono.models.config import ConfigError
from unisono.runtime.protocol import SamplingParams


class IdsOnly:
    """Answers' text is their ids with spaces between; prompts' text is refused.

    `name`: of the model.
    """

    has_chat_template = False
    eos_ids: tuple[int, ...] = ()
    """None beyond those of the model's config."""

    def __init__(self, name: str, vocab_size: int) -> None:
        self.name = name
        self.size = vocab_size

    def encode(self, text: str) -> list[int]:
        """Raise ConfigError: there is nothing to encode with."""
        raise ConfigError(
            f"{self.name} has no tokenizer: give token ids (--prompt-ids ID,ID,..., "
            '{"prompt_ids": [...]} in a .jsonl file, or lists of ids to LLM)'
        )

    def chat_ids(self, messages: Sequence[Mapping[str, str]]) -> list[int]:
        """Raise ConfigError, as `encode` does."""
        return self.encode("")

    def stream(self) -> _IdStream:
        return _IdStream()

    def token_bytes(self, token_id: int) -> bytes:
        """The id in decimal, as the answers' text has it."""
        return str(token_id).encode()


def check_text_params(params: SamplingParams, tokenizer: object) -> None:
    """Raise ConfigError if `params` speak of text and there is none."""
    if params.stop and isinstance(tokenizer, IdsOnly):
        raise ConfigError(
            f"--stop {params.stop[0]!r}: {tokenizer.name} has no tokenizer, so answers have no "
            "text; use --stop-token-ids"
        )


class _IdStream:
    def __init__(self) -> None:
        self._separator = ""

    def push(self, ids: Iterable[int]) -> str:
        text = ""
        for token in ids:
            text += f"{self._separator}{token}"
            self._separator = " "
        return text

    def flush(self) -> str:
        return ""
