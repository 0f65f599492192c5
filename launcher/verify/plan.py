"""What `unisono verify` runs: the axes, their values, the matrix and the engines it needs. Pure.

An axis is a row of `AXES`: a field of `Setting`, its plain value, what it asks of the engine and
how one sees that a run has reached what it is about. Nothing else knows the axes by name.

Starting an engine takes longer than most settings do. So what only the scheduler goes by (`limits`)
is told to a running engine, which forgets all it holds: every setting has a scheduler and a cache
as of a fresh engine. Only what the ranks are built for (`engine`) needs another one.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from unisono.runtime.protocol import Order, Reload, Reschedule, Sleep, Wake
from unisono.workers.config import BLOCK_SIZE

COMPANY = 8
"""Requests at a time, at least, of what can be tried in company: it takes many more steps to answer
them one by one, each interruption takes seconds, and alone nobody is ever pre-empted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One way to run the prompts. The defaults, at the least rank count, are the plain one."""

    tp: int
    dtype: str
    batch: int = 1
    """Requests submitted together."""
    chunk: int = 0
    """Most tokens of a step; 0: whole prompts."""
    prefix_cache: bool = False
    pre_empt: bool = False
    graphs: bool = False
    """Steps of decoding are replayed from CUDA graphs."""
    speculate: str = "off"
    """Tokens that the model drafts for itself and checks in one step."""
    sleep: bool = False
    """The engine gives memory back and takes it again in the middle of each generation."""
    reload: bool = False
    """It loads the same weights anew in the middle of each generation."""
    seeded: bool = False
    """Drawn with a seed instead of the likeliest token."""

    @property
    def plain(self) -> Setting:
        """What it is compared with, bit by bit: alone, whole, nothing cached, nobody pre-empted."""
        return replace(self, **{axis.name: axis.plain for axis in AXES})

    @property
    def label(self) -> str:
        """Everything that is not plain, in words."""
        words = [axis.show(getattr(self, axis.name)) for axis in AXES if not _is_plain(self, axis)]
        if self.seeded:
            words.append("seeded")
        return ", ".join(words) or "plain"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sizes:
    """What engines must hold."""

    longest: int
    """Tokens of the longest request."""
    most_requests: int
    """At a time, of any setting."""

    @property
    def blocks_each(self) -> int:
        """KV blocks of the longest request."""
        return -(-self.longest // BLOCK_SIZE)

    @property
    def num_blocks(self) -> int:
        """Of a cache in which nobody is pre-empted: all that run together find room."""
        return self.most_requests * self.blocks_each

    @property
    def whole_step(self) -> int:
        """Tokens of the largest step that cuts no prompt."""
        return self.longest * self.most_requests


@dataclass(frozen=True, slots=True, kw_only=True)
class Reach:
    """What a run of a setting has met."""

    longest_prompt: int
    num_cached_tokens: int
    num_preemptions: int
    num_replays: int
    """Graphs that were replayed between the first answer and the last."""
    num_drafted: int
    """Drafts that were checked."""
    interrupted: frozenset[str] = frozenset()
    """Axes whose orders were obeyed while answers were under way."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Axis:
    """One way in which runs may differ without another answer."""

    name: str
    """A field of `Setting`."""
    plain: Any
    show: Callable[[Any], str]
    engine: Callable[[Setting], dict[str, Any]] = lambda setting: {}
    """Options that ranks are started with, by field name."""
    limits: Callable[[Setting, Sizes], dict[str, Any]] = lambda setting, sizes: {}
    """What the scheduler goes by: fields of `Reschedule`."""
    missed: Callable[[Setting, Reach], str] = lambda setting, reach: ""
    """Why a run with another value than the plain one did not test it; "": it did."""
    needs: Mapping[str, Any] | None = None
    """Least values of other axes without which the value cannot show."""
    in_company: bool = False
    """Whether it is tried in company unless all pairs are run."""
    orders: Callable[[Reload], tuple[tuple[Order, ...], ...]] = lambda again: ()
    """What the engine is told in the middle of a generation, one group after another; `again`
    loads the weights that are there."""


def _missed_chunk(setting: Setting, reach: Reach) -> str:
    return "" if reach.longest_prompt > setting.chunk else "no prompt is longer than a chunk"


def _missed_cache(setting: Setting, reach: Reach) -> str:
    # Where blocks are short they may be gone before they are found: pairs of --full.
    return "" if reach.num_cached_tokens or setting.pre_empt else "no prefix was found"


def _missed_preemption(setting: Setting, reach: Reach) -> str:
    return "" if reach.num_preemptions else "nobody was pre-empted"


def _missed_graphs(setting: Setting, reach: Reach) -> str:
    return "" if reach.num_replays else "no graph was replayed"


def _missed_drafts(setting: Setting, reach: Reach) -> str:
    # Where blocks are short there may be no room for drafts.
    return "" if reach.num_drafted or setting.pre_empt else "no draft was checked"


def _missed_sleep(setting: Setting, reach: Reach) -> str:
    return "" if "sleep" in reach.interrupted else "nobody was answered when the engine slept"


def _missed_reload(setting: Setting, reach: Reach) -> str:
    return "" if "reload" in reach.interrupted else "nobody was answered when weights were loaded"


AXES = (
    Axis(name="batch", plain=1, show=lambda value: f"batch {value}"),
    Axis(
        name="chunk",
        plain=0,
        show=lambda value: f"chunk {value}",
        limits=lambda setting, sizes: {"max_step_tokens": setting.chunk or sizes.whole_step},
        missed=_missed_chunk,
        in_company=True,
    ),
    Axis(
        name="prefix_cache",
        plain=False,
        show=lambda value: "prefix cache",
        limits=lambda setting, sizes: {"prefix_cache": setting.prefix_cache},
        missed=_missed_cache,
        in_company=True,
    ),
    Axis(
        name="pre_empt",
        plain=False,
        show=lambda value: "pre-empt",
        # One request must fit, and no more than that.
        limits=lambda setting, sizes: {
            "num_blocks": sizes.blocks_each if setting.pre_empt else sizes.num_blocks
        },
        missed=_missed_preemption,
        needs={"batch": COMPANY},
    ),
    Axis(
        name="graphs",
        plain=False,
        show=lambda value: "graphs",
        engine=lambda setting: {"no_graphs": not setting.graphs},
        missed=_missed_graphs,
    ),
    Axis(
        name="speculate",
        plain="off",
        show=lambda value: f"{value} draft{'s' * (value != '1')}",
        engine=lambda setting: {"speculate": setting.speculate},
        missed=_missed_drafts,
    ),
    Axis(
        name="sleep",
        plain=False,
        show=lambda value: "sleep",
        missed=_missed_sleep,
        needs={"batch": COMPANY},
        orders=lambda again: ((Sleep(level=2), Wake()), (Sleep(level=1), Wake())),
    ),
    Axis(
        name="reload",
        plain=False,
        show=lambda value: "reload",
        missed=_missed_reload,
        needs={"batch": COMPANY},
        orders=lambda again: ((again,),),
    ),
)
"""The axes along which bits are promised to be equal."""
ALTERNATIVES = ("prefix_cache", "pre_empt")
"""Axes that hide each other: a small cache forgets what a prefix cache holds."""


def matrix(
    tps: Sequence[int],
    dtypes: Sequence[str],
    values: Mapping[str, Sequence[Any]],
    *,
    seeded: bool,
    full: bool,
) -> list[Setting]:
    """Return the settings to run, each plain one before those that are compared with it.

    `values`: by axis. Without `full`: every value alone, and few of them together.
    """
    found: dict[Setting, None] = {}
    for dtype, tp in itertools.product(dtypes, sorted(tps)):
        plain = Setting(tp=tp, dtype=dtype)
        ways = list(_product(plain, values) if full else _pruned(plain, values))
        found |= dict.fromkeys([plain, *ways])
        if seeded:
            drawn = [*ways] if full else ways[-1:]
            found |= dict.fromkeys(replace(way, seeded=True) for way in (plain, *drawn))
    return list(found)


def engine_options(setting: Setting, sizes: Sizes) -> dict[str, Any]:
    """Return the options of the engine that runs `setting`; equal ones share an engine."""
    options = {
        "tp": setting.tp,
        "dtype": setting.dtype,
        "max_model_len": sizes.longest + 1,
        "max_requests": sizes.most_requests,
        "max_step_tokens": sizes.whole_step,
        "kv_tokens": sizes.num_blocks * BLOCK_SIZE,
    }
    for axis in AXES:
        options |= axis.engine(setting)
    return options


def limits(setting: Setting, sizes: Sizes) -> Reschedule:
    """Return what the scheduler goes by while `setting` runs."""
    fields: dict[str, Any] = {}
    for axis in AXES:
        fields |= axis.limits(setting, sizes)
    return Reschedule(**fields)


def interruptions(setting: Setting, again: Reload) -> list[tuple[str, tuple[Order, ...]]]:
    """Return what is ordered in the middle of each generation of `setting`, and for which axis.

    Every axis has had its first word before one has its second: answers may be too short for all.
    """
    found = [
        (number, axis.name, orders)
        for axis in AXES
        if not _is_plain(setting, axis)
        for number, orders in enumerate(axis.orders(again))
    ]
    return [(name, orders) for _, name, orders in sorted(found, key=lambda each: each[0])]


def by_engine(
    settings: Sequence[Setting], sizes: Sizes
) -> list[tuple[dict[str, Any], list[Setting]]]:
    """Group settings by the engine they need, in order."""
    groups: list[tuple[dict[str, Any], list[Setting]]] = []
    for setting in settings:
        options = engine_options(setting, sizes)
        same = [members for known, members in groups if known == options]
        if same:
            same[0].append(setting)
        else:
            groups.append((options, [setting]))
    return groups


def what_was_missed(setting: Setting, reach: Reach) -> dict[str, str]:
    """Return the axes of `setting` that its run did not test, and why."""
    reasons = {
        axis.name: axis.missed(setting, reach) for axis in AXES if not _is_plain(setting, axis)
    }
    return {name: why for name, why in reasons.items() if why}


def _pruned(plain: Setting, values: Mapping[str, Sequence[Any]]) -> Iterator[Setting]:
    last = {}
    for axis in AXES:
        for value in values[axis.name]:
            if value != axis.plain:
                company = {"batch": COMPANY} if axis.in_company else {}
                yield _with(plain, {axis.name: value} | company)
                last[axis.name] = value
    for absent in ALTERNATIVES:
        together = {name: value for name, value in last.items() if name != absent}
        if len(together) > 1:
            yield _with(plain, together)


def _product(plain: Setting, values: Mapping[str, Sequence[Any]]) -> Iterator[Setting]:
    names = [axis.name for axis in AXES]
    for chosen in itertools.product(*(values[name] for name in names)):
        yield _with(plain, dict(zip(names, chosen, strict=True)))


def _with(plain: Setting, changes: Mapping[str, Any]) -> Setting:
    setting = replace(plain, **changes)
    for axis in AXES:
        if axis.needs and not _is_plain(setting, axis):
            least = {name: max(getattr(setting, name), low) for name, low in axis.needs.items()}
            setting = replace(setting, **least)
    return setting


def _is_plain(setting: Setting, axis: Axis) -> bool:
    return bool(getattr(setting, axis.name) == axis.plain)
