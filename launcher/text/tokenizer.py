"""Text to ids and back: one tokenizer, from a checkpoint directory or from a GGUF file."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

from unisono.launcher.model_source import ModelSource
from unisono.launcher.text.chat_template import ChatTemplate, Message, read_templates
from unisono.launcher.text.detokenizer import Detokenizer, piece_bytes, read_decoder_form
from unisono.models.config import ConfigError

if TYPE_CHECKING:
    import tokenizers

_NAMED_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token")
_PROBE = "unisono"


class Tokenizer:
    """What a checkpoint says about text: its vocabulary, special tokens and chat template."""

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        *,
        special_tokens: dict[str, str],
        templates: dict[str, str],
        eos_ids: Iterable[int] = (),
    ) -> None:
        """`special_tokens` by name ("bos_token", ...); `eos_ids` as the checkpoint lists them.

        Raises ConfigError if the decoder of `backend` cannot be streamed.
        """
        self._backend = backend
        self._form = read_decoder_form(backend)
        added = backend.get_added_tokens_decoder()
        self._special_pieces = frozenset(each.content for each in added.values() if each.special)
        self._templates = templates
        self._template = ChatTemplate(templates, special_tokens)
        self.bos_token = special_tokens.get("bos_token")
        self.eos_token = special_tokens.get("eos_token")
        self.size: int = 1 + max(backend.get_vocab(with_added_tokens=True).values(), default=-1)
        """Ids from here on mean nothing, though the model may have rows for them."""
        named = backend.token_to_id(self.eos_token) if self.eos_token is not None else None
        ends = (*eos_ids, named, self._end_of_turn())
        self.eos_ids: tuple[int, ...] = tuple(dict.fromkeys(i for i in ends if i is not None))
        """Ids that end an answer: all that the checkpoint names, and the template's end of turn."""

    @classmethod
    def load(cls, source: ModelSource) -> Self:
        """Read the tokenizer of `source`. Raises ConfigError, one line, if it cannot be used."""
        if source.kind == "gguf":
            return cls._load_gguf(source.path)
        return cls._load_directory(source.path)

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Return the ids of `text`; special tokens written in it become their ids.

        `add_special_tokens`: also what the checkpoint puts around every text (often a BOS).
        """
        ids: list[int] = self._backend.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        """Return the text of `ids`; unknown ids say nothing, invalid UTF-8 becomes U+FFFD."""
        return str(self._backend.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token_bytes(self, token_id: int) -> bytes:
        """Return what one id spells, special tokens their names; nothing for an unknown id."""
        piece = self._backend.id_to_token(token_id)
        return b"" if piece is None else piece_bytes(piece, self._form)

    def stream(self, skip_special_tokens: bool = True) -> Detokenizer:
        """Return a new stream whose pieces join to what `decode` gives."""
        skipped = self._special_pieces if skip_special_tokens else frozenset[str]()
        return Detokenizer(self._backend, self._form, skipped)

    @property
    def has_chat_template(self) -> bool:
        """Whether `chat_ids` can be used."""
        return bool(self._templates)

    def chat_text(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **kwargs: Any
    ) -> str:
        """Return the prompt text of a conversation; see `ChatTemplate.render`."""
        return self._template.render(messages, add_generation_prompt, **kwargs)

    def chat_ids(
        self, messages: Sequence[Message], add_generation_prompt: bool = True, **kwargs: Any
    ) -> list[int]:
        """Return the ids of `chat_text`. The template writes the BOS itself, so none is added."""
        text = self.chat_text(messages, add_generation_prompt, **kwargs)
        return self.encode(text, add_special_tokens=False)

    def _end_of_turn(self) -> int | None:
        """Return the special token that the chat template puts right after an answer."""
        if not self._templates:
            return None
        turns = [{"role": "user", "content": "?"}, {"role": "assistant", "content": _PROBE}]
        try:
            text = self.chat_text(turns, add_generation_prompt=False)
        except ConfigError:
            # The template wants other messages than these; it is the user's business then.
            return None
        _, found, after = text.rpartition(_PROBE)
        ids = self.encode(after.lstrip(), add_special_tokens=False) if found else []
        if ids and self._backend.id_to_token(ids[0]) in self._special_pieces:
            return ids[0]
        return None

    @classmethod
    def _load_gguf(cls, path: Path) -> Self:
        from unisono.launcher.text.gguf_tokenizer import build_gguf_tokenizer
        from unisono.models.gguf import read_gguf_tokenizer

        data = read_gguf_tokenizer(path)
        named = (
            data.bos_token_id,
            data.eos_token_id,
            data.unknown_token_id,
            data.padding_token_id,
        )
        return cls(
            build_gguf_tokenizer(data),
            special_tokens={
                name: data.tokens[index]
                for name, index in zip(_NAMED_TOKENS, named, strict=True)
                if index is not None
            },
            templates={} if data.chat_template is None else {"default": data.chat_template},
            eos_ids=[
                index for index in (data.eos_token_id, data.eot_token_id) if index is not None
            ],
        )

    @classmethod
    def _load_directory(cls, directory: Path) -> Self:
        backend = _read_backend(directory)
        config = _read_json(directory / "tokenizer_config.json")
        special_tokens_map = _read_json(directory / "special_tokens_map.json")
        special_tokens = {
            name: text
            for name in _NAMED_TOKENS
            for text in [_text_of(config.get(name)) or _text_of(special_tokens_map.get(name))]
            if text is not None
        }
        _mark_special(backend, [*special_tokens.values(), *_extra_tokens(config)])
        model_config = _read_json(directory / "config.json")
        eos_ids: list[int] = []
        for values in (_read_json(directory / "generation_config.json"), model_config):
            eos_ids += _ids_of(values.get("eos_token_id"))
        return cls(
            backend,
            special_tokens=special_tokens,
            templates=read_templates(directory, config),
            eos_ids=eos_ids,
        )


def _read_backend(directory: Path) -> tokenizers.Tokenizer:
    import tokenizers

    path = directory / "tokenizer.json"
    if not path.is_file():
        raise ConfigError(
            f"{directory} has no tokenizer.json, which is needed; where there is only"
            " tokenizer.model or vocab.json, transformers converts it:"
            " AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
        )
    try:
        backend = tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # the library raises Exception itself
        raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    # Some files keep the settings of a training run: they would cut prompts silently.
    backend.no_truncation()
    backend.no_padding()
    return backend


def _read_json(path: Path) -> dict[str, Any]:
    """Return the object in `path`; empty if there is no such file."""
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {' '.join(str(error).split())}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path} holds a {type(values).__name__}; it must hold a JSON object")
    return values


def _text_of(token: object) -> str | None:
    """Return the text of a token field: a text, or an object with "content"."""
    if isinstance(token, dict):
        token = token.get("content")
    return token if isinstance(token, str) else None


def _extra_tokens(config: dict[str, Any]) -> list[str]:
    """Return what transformers 4 calls additional and transformers 5 extra special tokens."""
    listed: list[object] = []
    for name in ("additional_special_tokens", "extra_special_tokens"):
        field = config.get(name)
        listed += field.values() if isinstance(field, dict) else field or []
    return [text for text in map(_text_of, listed) if text is not None]


def _mark_special(backend: tokenizers.Tokenizer, texts: Iterable[str]) -> None:
    """Make special what the configuration names so and `backend` holds as an ordinary piece."""
    from tokenizers import AddedToken

    known = {each.content for each in backend.get_added_tokens_decoder().values()}
    for text in dict.fromkeys(texts):
        if text not in known and backend.token_to_id(text) is not None:
            backend.add_special_tokens([AddedToken(text, normalized=False, special=True)])


def _ids_of(field: object) -> list[int]:
    """Return an eos_token_id field as a list: it may be absent, one id or several."""
    listed = field if isinstance(field, list) else [field]
    return [index for index in listed if isinstance(index, int) and not isinstance(index, bool)]
