"""What a kernel is called in a table: short, and apart from others. Pure and torch-free."""

from __future__ import annotations

import re

MOST = 56
"""Characters of a name."""
_TRITON_2 = re.compile(r"_0[\dcde]*[cde][\dcde]*$")
"""What Triton 2 put behind a name: a number for each argument and what is known of it."""
_RETURNS = re.compile(r"(?:void|std::enable_if<.*?>::type) ")
_HEAD = re.compile(r"[\w:]+")
_WORD = re.compile(r"(?<![\w:])(?:[A-Za-z_]\w*::)*([A-Za-z_]\w*)")
"""A name in a template, without its namespaces."""
_SAYS_NOTHING = frozenset(
    (
        *("array", "char", "const", "false", "lambda", "operator", "signed", "true"),
        *("gpu_kernel_impl", "gpu_kernel_impl_nocast", "TensorIterator", "TensorIteratorBase"),
        *("OffsetCalculator", "TrivialOffsetCalculator", "LoadWithoutCast", "StoreWithoutCast"),
    )
)


def short_name(name: str) -> str:
    """The name that a profile gives a kernel, copy or fill, cut to what tells it from others.

    Of C++ the function and the words of its template, functors and types as a rule, each once;
    namespaces, arguments and numbers go. Of what is still too long both ends are kept.
    """
    text = _told(name) or name
    return text if len(text) <= MOST else f"{text[: MOST // 2]}..{text[2 - MOST // 2 :]}"


def _told(name: str) -> str:
    if name.startswith(("Memcpy", "Memset")):
        return name.partition(" (")[0]
    text = name.replace("(anonymous namespace)::", "")
    if returns := _RETURNS.match(text):
        text = text[returns.end() :]
    head = _HEAD.match(text)
    if head is None or (head.end() < len(text) and text[head.end()] not in "<("):
        return text
    words = dict.fromkeys(_WORD.findall(_template(text[head.end() :])))
    told = [word for word in words if word not in _SAYS_NOTHING]
    short = _TRITON_2.sub("", head[0].rpartition("::")[2])
    return f"{short}<{' '.join(told)}>" if told else short


def _template(text: str) -> str:
    """What stands between the brackets that `text` begins with; "" if it begins with none."""
    depth = 0
    for place, letter in enumerate(text):
        depth += (letter == "<") - (letter == ">")
        if not depth:
            return text[1:place].replace("unsigned int", "")
    return text[1:]
