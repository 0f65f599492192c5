"""transformers' reading of the demo file: the model, and the tokenizer as it is."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

import numpy
import pytest
import torch

from unisono.launcher.demo_model import demo_model_path


@cache
def demo_oracle() -> tuple[Any, Any]:
    """Model, float32, and tokenizer."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    path = demo_model_path()
    where = {"pretrained_model_name_or_path": path.parent, "gguf_file": path.name}
    with parsed_once():
        model = AutoModelForCausalLM.from_pretrained(**where, dtype=torch.float32).eval()
        return model, AutoTokenizer.from_pretrained(**where)


@contextmanager
def parsed_once() -> Iterator[None]:
    """Have transformers parse a file once, and not for its config, weights and tokenizer each; and
    make the table of tensors' names once, not for every layer. Each takes seconds. So do the
    hundred thousand slices of a tokenizer, as maps of a file and not as plain arrays."""
    import gguf

    def plain_array(*args: Any, **options: Any) -> Any:
        return numpy.asarray(memory_map(*args, **options))

    memory_map = numpy.memmap
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(numpy, "memmap", plain_array)
        for name in ("GGUFReader", "get_tensor_name_map"):
            patch.setattr(gguf, name, cache(getattr(gguf, name)))
        yield
