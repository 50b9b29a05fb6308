"""How much memory a computation takes: its peak, and what its graph keeps for the backward pass."""

import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._library.custom_ops import OPDEFS
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only


class LiveStorages(TorchDispatchMode):
    """Follows the storages that operations create, and the peak of their total size, forward and backward.

    A storage counts from the operation that returns it (or first receives it, if another thread made it) until it is
    freed. What a kernel takes for itself, such as LAPACK's workspace, is not seen. For the CPU: CUDA counts by itself.

    Args:
        existing: tensors from before, which do not count.

    Example:
        >>> x = torch.zeros(1000)
        >>> with LiveStorages(x) as memory:
        ...     y = (x + 1) * 2  # two of 4,000 bytes while the product is made, one afterwards
        >>> memory.peak, memory.live
        (8000, 4000)
    """

    def __init__(self, *existing: Tensor):
        super().__init__()
        self.live = 0
        self.peak = 0
        self._sizes: dict[int, int] = {}  # by the address of the C++ storage
        self._ignored = {t.untyped_storage()._cdata for t in existing}
        self._existing = existing  # held, so that no new storage takes an ignored address

    def _follow(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        key, size = storage._cdata, storage.nbytes()
        if key not in self._ignored:
            if key not in self._sizes:
                weakref.finalize(storage, self._forget, key)
            self.live += size - self._sizes.get(key, 0)  # a storage may have been resized
            self._sizes[key] = size
            self.peak = max(self.peak, self.live)
        return tensor

    def _forget(self, key: int) -> None:
        self.live -= self._sizes.pop(key)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tree_map_only(Tensor, self._follow, (args, kwargs))
        if func.namespace == "eigengrain":
            # our operators are Python below the dispatcher, where no mode looks: run that Python under the mode
            with self:
                out = OPDEFS[func._schema.name]._init_fn(*args, **kwargs)
        else:
            out = func(*args, **kwargs)
        return tree_map_only(Tensor, self._follow, out)


def peak_bytes(work: Callable[[], object], *existing: Tensor) -> int | None:
    """Peak memory of ``work`` above what is there at its start, on the device of the first of the ``existing`` tensors.

    It is what ``torch.cuda`` counts on CUDA, :class:`LiveStorages` on the CPU, and None elsewhere.
    """
    device = existing[0].device
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        start = torch.cuda.memory_allocated(device)
        work()
        torch.cuda.synchronize(device)
        return torch.cuda.max_memory_allocated(device) - start
    if device.type != "cpu":
        return None
    with LiveStorages(*existing) as memory:
        work()
    return memory.peak


def saved_bytes(work: Callable[[], object], *inputs: Tensor) -> int:
    """Bytes that the graph of ``work`` keeps for its backward pass; each storage once, those of ``inputs`` not at all.

    Example:
        >>> x = torch.zeros(1000, requires_grad=True)
        >>> saved_bytes(lambda: x.exp(), x)  # the result itself
        4000
        >>> saved_bytes(lambda: x.sin(), x)  # the input alone
        0
    """
    storages = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage  # held, so that no later storage takes its address
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        work()
    ignored = {t.untyped_storage()._cdata for t in inputs}
    return sum(storage.nbytes() for key, storage in storages.items() if key not in ignored)
