"""What `unisono verify` has to do, once everything a user can get wrong is known to be right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from unisono.launcher.verify_plan import Setting, Sizes, by_engine
from unisono.models.config import ModelConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is verified."""

    settings: Sequence[Setting]
    prompts: Sequence[tuple[int, ...]]
    max_tokens: int
    model: ModelConfig

    @property
    def sizes(self) -> Sizes:
        """What engines must hold."""
        longest = max(len(prompt) for prompt in self.prompts) + self.max_tokens
        return Sizes(
            longest=longest,
            most_requests=max(each.batch for each in self.settings),
            num_prompts=len(self.prompts),
        )

    @property
    def groups(self) -> list[tuple[dict[str, Any], list[Setting]]]:
        """Settings by the engine they share, and its options."""
        return by_engine(self.settings, self.sizes)

    def base_of(self, setting: Setting) -> Setting:
        """The plain setting of the least rank count, which other counts are judged against."""
        same = [other for other in self.settings if other.dtype == setting.dtype]
        return min(same, key=lambda other: other.tp).plain

    @property
    def plain_of_counts(self) -> set[Setting]:
        """Plain settings that are compared with each other, if there are several rank counts."""
        greedy = {each for each in self.settings if each == each.plain and not each.seeded}
        return greedy if len({each.tp for each in greedy}) > 1 else set()
