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
        self._forms: dict[tuple[object, ...], _Form] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return partial(self._launch, grid)

    def _launch(self, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
        active = driver.active
        device = active.get_current_device()
        # As a number an address is not looked up by the driver again.
        handed = [arg.data_ptr() if isinstance(arg, Tensor) else arg for arg in args]
        traits = [trait(arg, given) for arg, given in zip(args, handed, strict=True)]
        name = (device, *options, *options.values(), *traits)
        form = self._forms.get(name)
        if form is None:
            self._forms[name] = self._first(grid, args, options)
            return
        run, function, metadata, constants = form
        x, y, z = (*grid, 1, 1)[:3]
        stream = active.get_current_stream(device)
        run(x, y, z, stream, function, metadata, None, None, None, *handed, *constants)

    def _first(self, grid: tuple[int, ...], args: Any, options: dict[str, Any]) -> _Form:
        """Launch by Triton, which compiles what it has not compiled yet."""
        compiled = self.kernel[grid](*args, **options)
        constants = self.kernel.params[len(args) :]
        assert all(param.is_constexpr for param in constants), "arguments come before constants"
        values = tuple(options[param.name] for param in constants)
        return _Form(compiled.run, compiled.function, compiled.packed_metadata, values)


def launchable(kernel: Any) -> Any:
    """Decorate what `triton.jit` returned, unless it is interpreted."""
    return Launchable(kernel) if isinstance(kernel, triton.JITFunction) else kernel


def trait(arg: Any, given: Any) -> object:
    """What Triton may look at in an argument, of which `given` is the address if it is a tensor.

    Addresses and numbers that are multiples of 16 may be known as such, and so may the number 1
    and numbers of more than 31 bits.
    """
    if isinstance(arg, Tensor):
        return arg.dtype, given % 16 == 0
    if isinstance(arg, int):
        return arg == 1, arg % 16 == 0, arg.bit_length() > 31
    if hasattr(arg, "block_shape"):  # A descriptor for the copy engine.
        return arg.base.dtype, *arg.block_shape
    return type(arg)


def blocks_of(size: int, block: int) -> int:
    """How many blocks of `block` it takes to cover `size`."""
    # Triton's own cdiv is made for kernels, and takes microseconds on the host.
    return -(-size // block)


def power_of_two(value: int) -> int:
    """Smallest power of two that is not less than `value`."""
    return 1 << (value - 1).bit_length()
