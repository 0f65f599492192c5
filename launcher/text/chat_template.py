"""Renders a conversation into the prompt text that a chat model was trained on.

Templates are programs that come with a checkpoint. They run in jinja2's immutable sandbox, set up
as in transformers, so that the same template gives the same text.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from unisono.models.config import ConfigError

if TYPE_CHECKING:
    import jinja2
    from jinja2.sandbox import ImmutableSandboxedEnvironment

Message = Mapping[str, Any]
"""One turn: "role" and "content", and what else the template knows of."""


class ChatTemplate:
    """The chat templates of one checkpoint: a default one and named others."""

    def __init__(self, templates: Mapping[str, str], special_tokens: Mapping[str, str]) -> None:
        """`special_tokens` are variables of every template: bos_token, eos_token and others."""
        self._templates = dict(templates)
        self._special_tokens = dict(special_tokens)
        self._compiled: dict[str, jinja2.Template] = {}

    def render(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """Return the text of `messages`, ending in the assistant's header if asked for.

        `kwargs` become variables of the template (`tools`, `documents`, `enable_thinking`, ...).
        With tools the template named "tool_use" serves, where there is one. Fields of a message
        that are None are left out. Raises ConfigError, one line, if the template does not compile
        or refuses the messages.
        """
        name = self._choose(with_tools=kwargs.get("tools") is not None)
        template = self._compile(name)
        variables = {"tools": None, "documents": None, **self._special_tokens, **kwargs}
        try:
            variables["messages"] = [_without_nones(message) for message in messages]
            return template.render(variables, add_generation_prompt=add_generation_prompt)
        except Exception as error:  # a template is foreign code: it may fail in any way
            raise ConfigError(
                f"the chat template {name!r} refuses these messages: {_one_line(error)}"
            ) from error

    def _choose(self, *, with_tools: bool) -> str:
        if with_tools and "tool_use" in self._templates:
            return "tool_use"
        if "default" in self._templates:
            return "default"
        raise ConfigError(
            "the model has no chat template named 'default'"
            f" (it has: {', '.join(sorted(self._templates)) or 'none'}); give a raw prompt instead"
        )

    def _compile(self, name: str) -> jinja2.Template:
        if name not in self._compiled:
            import jinja2

            try:
                self._compiled[name] = _environment().from_string(self._templates[name])
            except jinja2.TemplateSyntaxError as error:
                raise ConfigError(
                    f"the chat template {name!r} does not compile:"
                    f" line {error.lineno}: {_one_line(error)}"
                ) from error
        return self._compiled[name]


def read_templates(directory: Path, tokenizer_config: Mapping[str, Any]) -> dict[str, str]:
    """Return the chat templates of a Hugging Face checkpoint by name; empty if it has none.

    Files win over `tokenizer_config`: chat_template.jinja is "default", and
    additional_chat_templates/NAME.jinja are others. In `tokenizer_config` the field chat_template
    is one text or a list of {"name", "template"}. Raises ConfigError for any other form.
    """
    files = {path.stem: path for path in directory.glob("additional_chat_templates/*.jinja")}
    if (directory / "chat_template.jinja").is_file():
        files["default"] = directory / "chat_template.jinja"
    if files:
        return {name: _read_template(path) for name, path in sorted(files.items())}
    field = tokenizer_config.get("chat_template")
    if field is None:
        return {}
    if isinstance(field, str):
        return {"default": field}
    if isinstance(field, list) and all(_is_named_template(entry) for entry in field):
        return {entry["name"]: entry["template"] for entry in field}
    raise ConfigError(
        f"{directory / 'tokenizer_config.json'}: chat_template is neither a text"
        " nor a list of {name, template}"
    )


def _read_template(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} cannot be read: {_one_line(error)}") from error


def _without_nones(message: Message) -> dict[str, Any]:
    return {key: value for key, value in message.items() if value is not None}


def _is_named_template(entry: object) -> bool:
    return isinstance(entry, dict) and all(
        isinstance(entry.get(key), str) for key in ("name", "template")
    )


def _environment() -> ImmutableSandboxedEnvironment:
    """Return the sandbox with the filters and functions that published templates rely on."""
    from jinja2.ext import Extension, loopcontrols
    from jinja2.nodes import CallBlock, Node
    from jinja2.parser import Parser
    from jinja2.runtime import Macro
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(Extension):
        """`{% generation %} ... {% endgeneration %}` marks text for training: here, plain text."""

        tags = {"generation"}  # noqa: RUF012 - the base class declares it so

        def parse(self, parser: Parser) -> Node:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            # A call block, because its scope is part of what templates can observe.
            return CallBlock(self.call_method("_render"), [], [], body).set_lineno(line)

        def _render(self, caller: Macro) -> str:
            return str(caller())

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols]
    )
    environment.filters["tojson"] = _tojson
    environment.globals["raise_exception"] = _raise_exception
    environment.globals["strftime_now"] = _strftime_now
    return environment


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return plain JSON; jinja2's own filter escapes for HTML."""
    return json.dumps(
        value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )


def _raise_exception(message: str) -> NoReturn:
    import jinja2

    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()) or type(error).__name__
