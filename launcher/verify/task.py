"""What `unisono verify` has to do, once everything a user can get wrong is known to be right."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from unisono.launcher.verify.plan import Setting, Sizes, by_engine
from unisono.models.config import ModelConfig
from unisono.runtime.protocol import Reload


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """What is verified."""

    settings: Sequence[Setting]
    prompts: Sequence[tuple[int, ...]]
    max_tokens: int
    model: ModelConfig
    again: Reload
    """What has an engine load the weights that it has."""
    oracle: bool = False
    """Whether another program is asked too."""
    unasked: frozenset[str] = frozenset()
    """Axes that are tried by default."""

    @property
    def sizes(self) -> Sizes:
        """What engines must hold."""
        longest = max(len(prompt) for prompt in self.prompts) + self.max_tokens
        return Sizes(
            longest=longest,
            most_requests=max(each.batch for each in self.settings),
        )

    @property
    def num_verdicts(self) -> int:
        """Settings, and the oracle's word on each dtype."""
        return len(self.settings) + (len(self.bases) if self.oracle else 0)

    @property
    def groups(self) -> list[tuple[dict[str, Any], list[Setting]]]:
        """Settings by the engine they share, and its options."""
        return by_engine(self.settings, self.sizes)

    @property
    def num_promises(self) -> int:
        """At the most: what others are compared with is compared with nothing."""
        seeded = {each.seeded for each in self.settings}
        return self.num_verdicts - len(self.bases) * len(seeded)

    def base_of(self, setting: Setting) -> Setting:
        """The plain setting of the least rank count, which other counts are judged against."""
        same = [other for other in self.settings if other.dtype == setting.dtype]
        return replace(min(same, key=lambda other: other.tp).plain, seeded=setting.seeded)

    @property
    def forced(self) -> set[Setting]:
        """Greedy plain settings whose log-probabilities are compared.

        All, if there are several rank counts; those that the oracle is asked of.
        """
        greedy = {each for each in self.settings if each == each.plain and not each.seeded}
        if len({each.tp for each in greedy}) > 1:
            return greedy
        return greedy if self.oracle else set()

    @property
    def bases(self) -> list[Setting]:
        """Greedy plain settings of the least rank count, one for each dtype."""
        greedy = [each for each in self.settings if not each.seeded]
        return list(dict.fromkeys(map(self.base_of, greedy)))
