"""The options a user may set: derived from the config dataclasses, each default written once.

A field of `LaunchConfig`, `RuntimeConfig`, `WorkerConfig`, `SamplingParams` or `Submit` that has a
default is an option: its name, type and default come from the dataclass, its help from the
docstring literal below the field. This file adds what a type cannot say: the legal choices and the
least value. The command line and `LLM` check values by the same `OptionSpec.check`.
"""

from __future__ import annotations

import ast
import dataclasses
import functools
import itertools
import sys
from collections.abc import Callable, Mapping
from dataclasses import MISSING, dataclass
from typing import Any

import click

from unisono.launcher.config import LOG_LEVELS, LaunchConfig
from unisono.launcher.option_kinds import CONVERTERS, METAVARS, describe_kind, has_kind
from unisono.models.config import ConfigError, ModelConfig
from unisono.runtime.config import RuntimeConfig
from unisono.runtime.protocol import SamplingParams, Submit
from unisono.workers.config import CHOICES, MOST_REQUESTS, WorkerConfig

LAUNCH_OPTIONS = (
    "tp",
    "dtype",
    "device",
    "attn",
    "numerics",
    "collectives",
    "load_format",
    "overlay",
    "max_model_len",
    "max_requests",
    "kv_tokens",
    "memory_utilization",
    "state_slots",
    "state_dtype",
    "speculate",
    "accept",
    "max_step_tokens",
    "no_prefix_cache",
    "no_graphs",
    "graph_buckets",
    "capture",
    "random_padding",
    "log_level",
    "start_timeout_s",
    "stop_grace_s",
    "flight_dir",
    "trace",
)
"""Fields of the three nested configs; `LLM` and `unisono generate` take all of them."""
SAMPLING_OPTIONS = (
    "max_tokens",
    "ignore_eos",
    "stop_token_ids",
    "temperature",
    "top_k",
    "top_p",
    "min_p",
    "seed",
    "repetition_penalty",
    "presence_penalty",
    "frequency_penalty",
    "logit_bias",
    "min_tokens",
    "stop",
    "logprobs",
    "prompt_logprobs",
)
LOGPROB_OPTIONS = ("logprobs", "prompt_logprobs")
"""Sampling options whose outcome is no text: only JSON and the library show it."""

_CHOICES = {**CHOICES, "log_level": LOG_LEVELS}
_DTYPES = {
    "fp32": "float32",
    "float": "float32",
    "bf16": "bfloat16",
    "fp16": "float16",
    "half": "float16",
}
_SAME = {"speculate": {"0": "off"}, "dtype": _DTYPES, "state_dtype": _DTYPES}
"""Other words for legal values, by option."""
_LEAST = {
    "tp": 1,
    "max_requests": 1,
    "max_step_tokens": 1,
    "max_tokens": 1,
    "max_model_len": 2,
    "kv_tokens": 0,
    "state_slots": 1,
    "start_timeout_s": 1,
    "stop_grace_s": 0,
    "temperature": 0,
    "top_k": 0,
    "min_p": 0,
    "seed": 0,
    "presence_penalty": -2,
    "priority": -(2**31),
    "frequency_penalty": -2,
    "min_tokens": 0,
    "logprobs": 0,
    "prompt_logprobs": 0,
}
_ABOVE = {"top_p": 0, "repetition_penalty": 0, "memory_utilization": 0}
MOST_KV_TOKENS = 2**40
"""Far more than there is memory for; what is planned from it fits the messages to ranks."""
_MOST = {
    "max_requests": MOST_REQUESTS,
    **dict.fromkeys(("max_tokens", "min_tokens", "state_slots", "max_step_tokens"), 2**31 - 1),
    "kv_tokens": MOST_KV_TOKENS,
    "temperature": 100,
    "top_p": 1,
    "min_p": 1,
    "memory_utilization": 1,
    "top_k": 2**31 - 1,
    "seed": 2**63 - 1,
    "priority": 2**31 - 1,
    "repetition_penalty": 100,
    "presence_penalty": 2,
    "frequency_penalty": 2,
    "logprobs": 20,
    "prompt_logprobs": 20,
}
_BIAS_LIMIT = 100
_ZERO_IS_AUTO = ("max_model_len", "max_step_tokens", "memory_utilization", "state_slots")
Command = Callable[..., Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class OptionSpec:
    """One option: where it comes from and which values are legal."""

    name: str
    kind: str
    """The field's annotation: int, int | None, float, str, bool, tuples of int, str or pairs."""
    default: Any
    help: str
    choices: tuple[str, ...] = ()
    least: int | None = None
    above: int | None = None
    """A bound that is not legal itself."""
    most: int | None = None
    zero_is_auto: bool = False

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    def settle(self, value: Any) -> Any:
        """Return `value` as its field holds it: a number among choices as text."""
        if self.choices and has_kind(value, "int"):
            value = str(value)
        return _SAME.get(self.name, {}).get(value, value) if isinstance(value, str) else value

    def check(self, value: object) -> None:
        """Raise ConfigError, one line, if `value` is not legal by itself."""
        if self.choices and value not in self.choices:
            raise ConfigError(f"{self.flag} {value}: choose {_either(self.choices)}")
        if not has_kind(value, self.kind):
            raise ConfigError(f"{self.flag} {value!r}: expected {self._expected}")
        if value is not None and not self._is_inside(value):
            raise ConfigError(f"{self.flag} {value}: must be {self._range}")

    def parse(self, text: str) -> Any:
        """Turn the text of a command line into a legal value, or raise ConfigError."""
        if self.zero_is_auto and text == "auto":
            return self.default
        try:
            value = self.settle(CONVERTERS[self.kind](text))
        except ValueError:
            raise ConfigError(f"{self.flag} {text}: expected {self._expected}") from None
        self.check(value)
        return value

    @property
    def metavar(self) -> str:
        """What stands for the value in the help."""
        if self.choices:
            return f"[{'|'.join(self.choices)}]"
        if self.name.endswith("_dir"):
            return "DIR"
        if self._is_ids:
            return "ID,ID,..."
        if self.name == "trace":
            return "FILE"
        return "SECONDS" if self._is_time else METAVARS[self.kind] + "|auto" * self.zero_is_auto

    @property
    def _is_time(self) -> bool:
        return self.name.endswith("_s")

    @property
    def _is_ids(self) -> bool:
        return self.name.endswith("_ids")

    @property
    def _expected(self) -> str:
        if self._is_ids:
            return "token ids separated by commas"
        return "a number of seconds" if self._is_time else describe_kind(self.kind)

    @property
    def _range(self) -> str:
        parts = ["0 (automatic) or"] if self.zero_is_auto else []
        if self.least is not None:
            parts.append(f"at least {self.least}")
        if self.above is not None:
            parts.append(f"above {self.above}")
        if self.most is not None:
            parts.append(f"and at most {self.most}")
        return " ".join(parts)

    def _is_inside(self, value: Any) -> bool:
        if self.zero_is_auto and value == 0:
            return True
        return (
            (self.least is None or value >= self.least)
            and (self.above is None or value > self.above)
            and (self.most is None or value <= self.most)
        )


def option_spec(name: str) -> OptionSpec:
    """Return the option called `name`, a field of one of the config dataclasses."""
    return _all_specs()[name]


def config_options(*names: str) -> Callable[[Command], Command]:
    """A decorator that gives a click command the named options, in this order.

    An option that is not given arrives as None: the dataclass alone knows its default.
    """

    def decorate(command: Command) -> Command:
        for name in reversed(names):
            command = _click_option(option_spec(name))(command)
        return command

    return decorate


def given(values: Mapping[str, Any], names: tuple[str, ...]) -> dict[str, Any]:
    """The part of a command's arguments that is named in `names` and was set by the user."""
    return {name: values[name] for name in names if values.get(name) is not None}


def make_launch_config(
    values: Mapping[str, Any], *, model_path: str, model: ModelConfig
) -> LaunchConfig:
    """Nest the given option values into a `LaunchConfig`; the others keep their defaults.

    Raises ConfigError for an unknown name or an illegal value.
    """
    values = _settled(values, LAUNCH_OPTIONS)
    if values.get("kv_tokens") and values.get("memory_utilization"):
        raise ConfigError(
            f"--memory-utilization {values['memory_utilization']}: --kv-tokens "
            f"{values['kv_tokens']} sets the size of the KV cache by itself; give one of the two"
        )
    worker = WorkerConfig(model_path=model_path, model=model, **_fields_of(WorkerConfig, values))
    runtime = RuntimeConfig(worker=worker, **_fields_of(RuntimeConfig, values))
    return LaunchConfig(runtime=runtime, **_fields_of(LaunchConfig, values))


def make_sampling_params(values: Mapping[str, Any]) -> SamplingParams:
    """Build `SamplingParams` from the given option values. Raises ConfigError."""
    params = SamplingParams(**_settled(values, SAMPLING_OPTIONS))
    _check_combination(params)
    return params


def check_sampling_params(params: SamplingParams, model: ModelConfig) -> None:
    """Raise ConfigError if `params` is not legal, by itself or for this model."""
    for field in dataclasses.fields(params):
        option_spec(field.name).check(getattr(params, field.name))
    _check_combination(params)
    bias_ids = [token for token, _ in params.logit_bias]
    for name, tokens in (("stop_token_ids", params.stop_token_ids), ("logit_bias", bias_ids)):
        for token in tokens:
            if not 0 <= token < model.vocab_size:
                raise ConfigError(
                    f"{option_spec(name).flag} {token}: "
                    f"the model's token ids run from 0 to {model.vocab_size - 1}"
                )


def _check_combination(params: SamplingParams) -> None:
    if params.min_tokens > params.max_tokens:
        raise ConfigError(
            f"{option_spec('min_tokens').flag} {params.min_tokens}: "
            f"must be at most max_tokens, {params.max_tokens}"
        )
    flag, seen = option_spec("logit_bias").flag, set()
    for token, bias in params.logit_bias:
        if not -_BIAS_LIMIT <= bias <= _BIAS_LIMIT:
            raise ConfigError(f"{flag} {token}:{bias}: a bias is -{_BIAS_LIMIT} to {_BIAS_LIMIT}")
        if token in seen:
            raise ConfigError(f"{flag} {token}:{bias}: each token id may stand once")
        seen.add(token)


def _settled(values: Mapping[str, Any], legal: tuple[str, ...]) -> dict[str, Any]:
    """Return the values as their fields hold them, each checked."""
    settled = {}
    for name, value in values.items():
        if name not in legal:
            raise ConfigError(f"unknown option {name!r}: choose from {', '.join(legal)}")
        settled[name] = option_spec(name).settle(value)
        option_spec(name).check(settled[name])
    return settled


def _fields_of(owner: type, values: Mapping[str, Any]) -> dict[str, Any]:
    names = {field.name for field in dataclasses.fields(owner)}
    return {name: value for name, value in values.items() if name in names}


@functools.cache
def _all_specs() -> dict[str, OptionSpec]:
    return {
        field.name: OptionSpec(
            name=field.name,
            kind=str(field.type),
            default=field.default,
            help=_field_docs(owner).get(field.name, ""),
            choices=_CHOICES.get(field.name, ()),
            least=_LEAST.get(field.name),
            above=_ABOVE.get(field.name),
            most=_MOST.get(field.name),
            zero_is_auto=field.name in _ZERO_IS_AUTO,
        )
        for owner in (LaunchConfig, RuntimeConfig, WorkerConfig, SamplingParams, Submit)
        for field in dataclasses.fields(owner)
        if field.default is not MISSING
    }


@functools.cache
def _field_docs(owner: type) -> dict[str, str]:
    """The docstring literal below each field of a class; Python itself drops them."""
    spec = sys.modules[owner.__module__].__spec__
    source = spec.loader.get_source(owner.__module__) if spec else None  # type: ignore[union-attr]
    body: list[ast.stmt] = []
    for node in ast.parse(source or "").body:
        if isinstance(node, ast.ClassDef) and node.name == owner.__name__:
            body = node.body
    docs = {}
    for field, below in itertools.pairwise(body):
        match field, below:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                docs[name] = " ".join(text.split())
    return docs


def _click_option(spec: OptionSpec) -> Callable[[Command], Command]:
    if spec.kind == "bool":
        return click.option(spec.flag, spec.name, is_flag=True, default=None, help=spec.help)
    if spec.kind == "tuple[str, ...]":
        return _repeatable_option(spec)
    shown = ",".join(map(str, spec.default)) if isinstance(spec.default, tuple) else spec.default
    text = spec.help if shown in ("", None) else f"{spec.help}  [default: {shown}]"
    return click.option(
        spec.flag, spec.name, type=_ConfigValue(spec), default=None, metavar=spec.metavar, help=text
    )


def _repeatable_option(spec: OptionSpec) -> Callable[[Command], Command]:
    def collect(
        ctx: click.Context, param: click.Parameter, texts: tuple[str, ...]
    ) -> tuple[str, ...] | None:
        spec.check(texts)
        return texts or None

    return click.option(
        spec.flag,
        spec.name,
        multiple=True,
        default=None,
        callback=collect,
        metavar=METAVARS[spec.kind],
        help=spec.help,
    )


class _ConfigValue(click.ParamType):
    """Lets an `OptionSpec` convert and check, so that both doors give the same message."""

    name = "value"

    def __init__(self, spec: OptionSpec) -> None:
        self._spec = spec

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        return self._spec.parse(value) if isinstance(value, str) else value


def _either(choices: tuple[str, ...]) -> str:
    return ", ".join(choices[:-1]) + " or " + choices[-1]
