"""Launching a compiled kernel in a few microseconds of the host's time.

Triton decides anew at every call which compiled form of a kernel is meant: it reads its settings
out of the environment, and makes a string of all arguments and options. A step that is not replayed
launches hundreds of kernels, and the device would wait for that. Here the form is remembered under
what it can depend on: the options, and of each argument what Triton looks at when it compiles.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import triton
from torch import Tensor
from triton.runtime import driver


class _Form(NamedTuple):
    """A compiled kernel, and what is handed to it after the arguments of a call."""

    run: Callable[..., None]
    function: int
    metadata: object
    constants: tuple[object, ...]


class Launchable:
    """A kernel made by `triton.jit`, launched as that is: kernel[grid](arguments, **options).

    Arguments that are no constants come first, in order; constants and options by name. Tensors
    are on the current device. What Triton checks and hooks at each launch is looked at once.
    """

    def __init__(self, kernel: triton.JITFunction[Any]) -> None:
        self.kernel = kernel
        self._bound: dict[tuple[object, ...], _Bound] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return lambda *args, **options: self.bound(options).launch(grid, *args)

    def bound(self, options: dict[str, Any]) -> _Bound:
        """What launches it with these."""
        name = (*options, *options.values())
        found = self._bound.get(name)
        if found is None:
            found = self._bound[name] = _Bound(partial(self._first, options=options))
        return found

    def _first(self, grid: tuple[int, ...], args: Any, options: dict[str, Any]) -> _Form:
        """Launch by Triton, which compiles what it has not compiled yet."""
        compiled = self.kernel[grid](*args, **options)
        constants = self.kernel.params[len(args) :]
        assert all(param.is_constexpr for param in constants), "arguments come before constants"
        values = tuple(options[param.name] for param in constants)
        return _Form(compiled.run, compiled.function, compiled.packed_metadata, values)


class _Bound:
    """A kernel whose options are given; `first` launches it by Triton."""

    def __init__(self, first: Callable[..., _Form]) -> None:
        self._first = first
        self._forms: dict[tuple[object, ...], _Form] = {}

    def launch(self, grid: tuple[int, ...], *args: Any) -> None:
        active = driver.active
        device = active.get_current_device()
        traits: list[object] = [device]
        handed: list[Any] = []
        for arg in args:
            # A step has thousands of arguments: of the usual kinds what `trait` says, uncalled.
            if type(arg) is Tensor:
                # As a number an address is not looked up by the driver again.
                address = arg.data_ptr()
                handed.append(address)
                traits.append(arg.dtype)
                if address % 16:
                    traits.append(False)
            elif type(arg) is int:
                handed.append(arg)
                traits.append(arg == 1 or (arg % 16 == 0, arg.bit_length() > 31))
            else:
                handed.append(arg)
                traits.append(trait(arg))
        name = tuple(traits)
        form = self._forms.get(name)
        if form is None:
            self._forms[name] = self._first(grid, args)
            return
        run, function, metadata, constants = form
        x, y, z = (*grid, 1, 1)[:3]
        stream = active.get_current_stream(device)
        run(x, y, z, stream, function, metadata, None, None, None, *handed, *constants)


def launchable(kernel: Any) -> Any:
    """Decorate what `triton.jit` returned, unless it is interpreted."""
    return Launchable(kernel) if isinstance(kernel, triton.JITFunction) else kernel


def bound(kernel: Any, **options: Any) -> Any:
    """What a kernel that is launched often is launched by, its options named once:
    bound(kernel, **options).launch(grid, arguments)."""
    return (
        kernel.bound(options) if isinstance(kernel, Launchable) else _Interpreted(kernel, options)
    )


class _Interpreted:
    """The same of a kernel in the interpreter."""

    def __init__(self, kernel: Any, options: dict[str, Any]) -> None:
        self.kernel, self._options = kernel, options

    def launch(self, grid: tuple[int, ...], *args: Any) -> None:
        self.kernel[grid](*args, **self._options)


def trait(arg: Any) -> object:
    """What Triton may look at in an argument.

    Addresses and numbers that are multiples of 16 may be known as such, and so may the number 1
    and numbers of more than 31 bits.
    """
    if hasattr(arg, "block_shape"):  # A descriptor for the copy engine.
        return arg.base.dtype, *arg.block_shape
    if isinstance(arg, Tensor):
        return arg.dtype, arg.data_ptr() % 16 == 0
    if isinstance(arg, int):
        return arg == 1, arg % 16 == 0, arg.bit_length() > 31
    return type(arg)


def blocks_of(size: int, block: int) -> int:
    """How many blocks of `block` it takes to cover `size`."""
    # Triton's own cdiv is made for kernels, and takes microseconds on the host.
    return -(-size // block)


def power_of_two(value: int) -> int:
    """Smallest power of two that is not less than `value`."""
    return 1 << (value - 1).bit_length()
