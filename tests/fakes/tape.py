"""A recorder of decode steps that works on a processor as CUDA graphs do on a GPU.

It writes down each operation with the very tensors that it read and wrote, and replays those: what
Python decided while it recorded stays decided. As with CUDA, recording a step changes nothing, and
what must wait for the device, or comes from main memory, cannot be recorded.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

_WAITING = {
    "aten::_local_scalar_dense", "aten::item", "aten::nonzero", "aten::is_nonzero", "aten::equal",
    "aten::masked_select", "aten::_unique2", "aten::unique_dim", "aten::bincount",
    "aten::lift_fresh",
}  # fmt: skip
"""Operations whose result Python, or the size of another tensor, waits for."""


class TapeRecorder:
    """Records steps on tapes."""

    def __init__(self) -> None:
        self.num_recorded = self.num_replayed = 0

    def record(self, work: Callable[[], None]) -> Callable[[], None]:
        tape = _Tape()
        try:
            with tape:
                work()
        finally:
            tape.take_back()
        self.num_recorded += 1

        def replay() -> None:
            self.num_replayed += 1
            tape.replay()

        return replay


class _Tape(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self._entries: list[tuple[Any, Any, Any, Any]] = []
        self._earlier: list[tuple[torch.Tensor, torch.Tensor]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func.name().partition(".")[0]
        is_mask = name in {"aten::index", "aten::index_put_", "aten::index_put"} and any(
            index is not None and index.dtype == torch.bool for index in args[1]
        )
        if name in _WAITING or is_mask:
            raise RuntimeError(f"{name} waits for the device")
        arguments = func._schema.arguments
        for argument, value in zip(arguments, args, strict=False):
            if argument.alias_info is not None and argument.alias_info.is_write:
                self._earlier.append((value, value.clone()))
        output = func(*args, **kwargs)
        is_view = any(
            one.alias_info is not None and not one.alias_info.is_write
            for one in func._schema.returns
        )
        # A view stays a view of the same memory.
        if not is_view:
            self._entries.append((func, args, kwargs, output))
        return output

    def take_back(self) -> None:
        """Undoes what recording has written."""
        for tensor, earlier in reversed(self._earlier):
            tensor.copy_(earlier)
        self._earlier.clear()

    def replay(self) -> None:
        for func, args, kwargs, recorded in self._entries:
            outputs = func(*args, **kwargs)
            if func._schema.is_mutable:
                continue
            several = isinstance(outputs, tuple | list)
            for output, place in zip(
                outputs if several else [outputs], recorded if several else [recorded], strict=True
            ):
                if isinstance(place, torch.Tensor):
                    place.copy_(output)
