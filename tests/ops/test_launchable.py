"""Kernels launched by `ops/kernels/launch.py`: all that the host launches, and no others."""

from __future__ import annotations

import ast
import re

from tests.paths import ROOT

FILES = sorted((ROOT / "ops" / "kernels").glob("*.py"))
LAUNCH = re.compile(r"\b(\w*kernel)\[|\bbound\(\s*(?:kernels\.)?(\w*kernel)\b")


def decorated(name: str) -> set[str]:
    """Functions of all kernel files with this decorator."""
    return {
        node.name
        for file in FILES
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef)
        and name in {ast.unparse(each).split("(")[0] for each in node.decorator_list}
    }


def test_what_is_launched_is_launchable_and_nothing_else() -> None:
    sources = [file.read_text() for file in [*FILES, ROOT / "ops" / "symmetric.py"]]
    found = [names for source in sources for names in LAUNCH.findall(source)]
    launched = {plain or bound for plain, bound in found} - {"kernel"}
    # Those are handed to a function that launches whichever it gets.
    launched |= {"one_shot_all_reduce_kernel", "one_shot_all_reduce_max_kernel"}
    assert launched == decorated("launchable")


def test_no_kernel_calls_one_that_is_launchable() -> None:
    """A compiler that meets one would not know it for a kernel; the interpreter does not mind."""
    launchable = decorated("launchable")
    for file in FILES:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
                assert node.func.id not in launchable, f"{file.name}: {node.func.id}"
