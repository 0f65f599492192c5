"""Where kernels are tested: on the GPU where there is one, else in Triton's interpreter."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from inspect import ismodule
from typing import Any

import pytest
import torch
from torch import Tensor

IS_GPU = torch.cuda.is_available()
DEVICE = torch.device("cuda" if IS_GPU else "cpu")
DTYPES = (
    [torch.float32, torch.float16, torch.bfloat16]
    if IS_GPU
    # The interpreter computes `tl.dot` of bfloat16 operands wrongly.
    else [torch.float32, torch.float16]
)

MARKS = [pytest.mark.gpu] if IS_GPU else []
"""`pytestmark` of a file of kernel tests: `scripts/test --gpu` runs them compiled."""


def poisoned(*shape: int, dtype: torch.dtype) -> Tensor:
    """NaN everywhere: what a kernel does not write shows, and what it should not read spreads."""
    return torch.full(shape, float("nan"), dtype=dtype, device=DEVICE)


def assert_same_rows(name: str, got: Tensor, want: Tensor) -> None:
    """Equal bits, compared where the tensors lie: they may be large."""
    assert got.dtype == want.dtype, f"{name}: dtype {got.dtype}, expected {want.dtype}"
    assert got.shape == want.shape, f"{name}: shape {list(got.shape)}, expected {list(want.shape)}"
    bits = {2: torch.int16, 4: torch.int32}[got.element_size()]
    differs = got.contiguous().view(bits) != want.contiguous().view(bits)
    if not bool(differs.any()):
        return
    rows = differs.any(1).nonzero().flatten().tolist()
    raise AssertionError(
        f"{name}: {int(differs.sum())} of {got.numel()} elements differ, in {len(rows)} rows from "
        f"{rows[:8]}; largest by {float((got.float() - want.float()).abs().max()):.3e}"
    )


@contextmanager
def kept_blas_settings() -> Iterator[None]:
    """Packing a linear layer for a GPU changes settings of the process; here they come back."""
    if not IS_GPU:
        yield
        return
    matmul = torch.backends.cuda.matmul
    library = torch.backends.cuda.preferred_blas_library()
    bf16 = torch._C._get_cublas_allow_bf16_reduced_precision_reduction()
    fp16 = torch._C._get_cublas_allow_fp16_reduced_precision_reduction()
    yield
    torch.backends.cuda.preferred_blas_library(library)
    matmul.allow_bf16_reduced_precision_reduction = bf16
    matmul.allow_fp16_reduced_precision_reduction = fp16


def make_products_hide_their_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have the interpreter sum a product in float64, rounded once: NumPy's order of a sum follows
    the tile's shape."""
    if IS_GPU:
        return
    from triton.runtime import interpreter

    def create_dot(_self: Any, a: Any, b: Any, d: Any, *_args: Any) -> Any:
        product = a.data.astype("float64") @ b.data.astype("float64") + d.data
        return interpreter.TensorHandle(product.astype("float32"), d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


def _let_loops_count() -> None:
    """Have the interpreter take a kernel's argument as the bound of a loop under NumPy 2.4 too.

    It calls `int` on an array of one element, which NumPy no longer allows.
    """
    from triton.runtime import interpreter

    patch = interpreter._patch_lang_tensor

    def patch_and_mend(tensor: Any, scope: Any) -> None:
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

    interpreter._patch_lang_tensor = patch_and_mend


def _keep_spread_masks() -> None:
    """Have the interpreter of Triton 3.9 keep a truth value one when it is spread over a block.

    It makes whole numbers of it there, and then takes no such mask.
    """
    from triton.runtime import interpreter

    spread = interpreter.InterpreterBuilder.create_splat

    def spread_and_mend(self: Any, kind: Any, value: Any) -> Any:
        block = spread(self, kind, value)
        if value.data.dtype == bool:
            block.data = block.data.astype(bool)
        return block

    interpreter.InterpreterBuilder.create_splat = spread_and_mend


def _patch_the_language_once() -> None:
    """Have the interpreter replace the functions of the language once in a run of a kernel, and not
    again for each call of a function in it: that took a third of the time of these tests."""
    from triton import language
    from triton.runtime import interpreter

    patch = interpreter._patch_lang
    replaced: set[str] = set()
    """Modules of the language, while a kernel runs."""

    @cache
    def modules_of(fn: Any) -> frozenset[str]:
        known = {language.__name__, language.core.__name__}
        return (
            frozenset(each.__name__ for each in fn.__globals__.values() if ismodule(each)) & known
        )

    def patch_what_is_left(fn: Any) -> Any:
        if modules_of(fn) <= replaced:
            return interpreter._LangPatchScope()
        is_start, scope = not replaced, patch(fn)
        replaced.update(modules_of(fn))
        restore = scope.restore

        def restore_and_forget() -> None:
            replaced.clear()
            restore()

        if is_start:
            scope.restore = restore_and_forget
        return scope

    interpreter._patch_lang = patch_what_is_left


def _make_types_once() -> None:
    """Have the interpreter keep what it makes of a type and a shape, which are few, and not make it
    again for each value in a kernel: that took two fifths of the time of these tests."""
    from triton import language
    from triton.runtime import interpreter

    core = language.core
    numpy_dtype, unwrap = interpreter._get_np_dtype, core._unwrap_if_constexpr
    make_type, make_tensor = core.block_type.__init__, core.tensor.__init__
    dtypes: dict[str, Any] = {}
    types: dict[tuple[Any, ...], tuple[Any, ...]] = {}
    of_a_number: list[Any] = []
    plain = {int, bool, float, str, type(None), core.tensor, core.block_type, core.dtype}

    def known_numpy_dtype(kind: Any) -> Any:
        name = kind.scalar.name
        if name not in dtypes:
            dtypes[name] = numpy_dtype(kind)
        return dtypes[name]

    def make_known_type(self: Any, element_ty: Any, shape: Any) -> None:
        key = (element_ty.name, *shape)
        if key not in types:
            make_type(self, element_ty, shape)
            types[key] = (self.shape, self.numel, self.name, [])
        self.element_ty = element_ty
        self.shape, self.numel, self.name, self.of_tensors = types[key]

    def make_tensor_of_known_shape(self: Any, handle: Any, kind: Any) -> None:
        known = kind.of_tensors if kind.is_block() else of_a_number
        if not known:
            make_tensor(self, handle, kind)
            known[:] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, kind, kind.scalar
        self.shape, self.numel = known

    def unwrap_what_is_wrapped(value: Any) -> Any:
        kind = type(value)
        if kind is core.constexpr:
            return value.value
        return value if kind in plain else unwrap(value)

    interpreter._get_np_dtype = known_numpy_dtype
    core.block_type.__init__ = make_known_type
    core.tensor.__init__ = make_tensor_of_known_shape
    for module in [each for name, each in sys.modules.items() if name.startswith("triton.")]:
        if getattr(module, "_unwrap_if_constexpr", None) is unwrap:
            module._unwrap_if_constexpr = unwrap_what_is_wrapped  # type: ignore[attr-defined]


if not IS_GPU:
    _patch_the_language_once()
    _make_types_once()
    _let_loops_count()
    _keep_spread_masks()
