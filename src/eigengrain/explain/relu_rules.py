r"""How a gradient passes a ReLU: plain backpropagation, the rule of DeConvNet, or both masks (guided).

With y = max(x, 0) and g the gradient at y, the gradient at x is

.. math:: g\,[x > 0] \ \text{(vanilla)}, \qquad g\,[g > 0] \ \text{(deconv, Eq. 7)}, \qquad g\,[x > 0]\,[g > 0]
   \ \text{(guided)}.

Eq. 6 of the paper prints vanilla as 1 where the gradient is positive, which is not a derivative; here vanilla is plain
backpropagation [1]. No hooks are used: the calls of the forward pass are intercepted while it runs.

References:
    [1] Simonyan et al., Deep inside convolutional networks, 2014.
    [2] Zeiler and Fergus, Visualizing and understanding convolutional networks, 2014 (deconv).
    [3] Springenberg et al., Striving for simplicity, 2015 (guided).
"""

import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from traceback import walk_stack
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode

from eigengrain.errors import ReLURuleError, UnknownName
from eigengrain.names import RULES

#: other non-linearities, by the name of their function in torch.nn.functional, torch and torch.Tensor
_OTHERS = frozenset(
    "gelu silu hardswish hardsigmoid sigmoid special_expit tanh softmax special_softmax log_softmax softmin gumbel_softmax "
    "elu selu celu leaky_relu prelu rrelu mish softplus softsign softshrink hardshrink tanhshrink logsigmoid log_sigmoid "
    "glu scaled_dot_product_attention multi_head_attention_forward".split()
)

#: graph nodes that are, or can hide, a non-linearity whose call was not intercepted: compiled and scripted code
_HIDDEN = re.compile(
    r"(CompiledFunction|DifferentiableGraph|Relu|Threshold|Hardtanh|Gelu|Silu|Hardswish|Hardsigmoid|Sigmoid|Tanh|Softmax|"
    r"Elu|Celu|LeakyRelu|PreluKernel|RreluWithNoise|Mish|Softplus)Backward\d*$"
)


def check_rule(rule: str) -> None:
    if rule not in RULES:
        raise UnknownName("rule", rule, RULES)


class _ReLU(NamedTuple):
    """A kind of ReLU: its derivative times a gradient, and whether that is computed from the input or the output."""

    derivative: Callable[[Tensor, Tensor], Tensor]
    at: Literal["input", "output"]


# Each saves the tensor that PyTorch's own operation saves, and uses its kernel: same memory, same numbers under vanilla,
# and no other tensor that a later in-place operation could overwrite.
_PLAIN = _ReLU(lambda gradient, y: torch.ops.aten.threshold_backward(gradient, y, 0), "output")
_THRESHOLD = _ReLU(lambda gradient, x: torch.ops.aten.threshold_backward(gradient, x, 0), "input")
_CLAMP = _ReLU(lambda gradient, x: torch.where(x >= 0, gradient, 0.0), "input")


def _clipped(cap: float) -> _ReLU:
    return _ReLU(lambda gradient, x: torch.ops.aten.hardtanh_backward(gradient, x, 0, cap), "input")


def _classify(name: str, x: Tensor, rest: tuple[Any, ...], options: dict[str, Any]) -> _ReLU | Literal["other"] | None:
    """Tell whether a call is a ReLU, another non-linearity, or neither."""

    def option(place: int, key: str, default: Any = None) -> Any:
        return rest[place] if len(rest) > place else options.get(key, default)

    if name == "relu":
        return _PLAIN
    if name == "relu6":
        return _clipped(6.0)
    if name == "hardtanh":
        low, high = option(0, "min_val", -1.0), option(1, "max_val", 1.0)
        return _clipped(high) if low == 0 else "other"
    if name == "threshold":
        return _THRESHOLD if option(0, "threshold") == 0 and option(1, "value") == 0 else "other"
    if name in ("clamp", "clip", "clamp_min"):
        # Only for feature maps: elsewhere a clamp guards a division or a root. Two bounds are used for hard sigmoids.
        low = option(0, "min")
        if x.ndim != 4 or not isinstance(low, int | float) or low != 0:
            return None
        return _CLAMP if name == "clamp_min" or option(1, "max") is None else "other"
    return "other" if name in _OTHERS else None


class _ApplyReLU(torch.autograd.Function):
    """A ReLU whose backward pass looks up the current rule, so that one forward pass serves all rules."""

    @staticmethod
    def forward(x: Tensor, compute: Callable[[Tensor], Tensor], *others: object) -> Tensor:
        return compute(x)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Any) -> None:
        x, _, relu, before, rules = inputs
        in_place = output is x
        if in_place:
            ctx.mark_dirty(x)
        ctx.save_for_backward(before if before is not None else x if relu.at == "input" and not in_place else output)
        ctx.relu, ctx.rules = relu, rules  # type: ignore[attr-defined]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (at,) = ctx.saved_tensors
        rule = ctx.rules.rule
        onward = gradient if rule == "deconv" else ctx.relu.derivative(gradient, at)
        return onward if rule == "vanilla" else onward.clamp_min(0), None, None, None, None


class ReLURules(TorchFunctionMode):
    """Context for a forward pass whose ReLUs follow :attr:`rule` in every later backward pass.

    A ReLU is any call of ``relu``, ``threshold`` at 0, the clipped ``relu6`` and ``hardtanh`` from 0, and ``clamp`` of a
    map (B, C, H, W) from 0 without an upper bound. DeConv, as published, depends on the gradient only, so it also passes a
    clipped ReLU above its cap. Max-pooling is not changed. A ReLU that is not a function call, such as ``x * (x > 0)``, is
    not detected.

    Args:
        rule: ``vanilla``, ``deconv`` or ``guided``; can be set between backward passes.
        model: network whose module names appear in the error of :meth:`require_relus`.

    Example:
        >>> x = torch.tensor([-1.0, 2.0, 3.0], requires_grad=True)
        >>> with ReLURules("deconv") as rules:
        ...     y = torch.relu(x) * torch.tensor([1.0, 1.0, -1.0])
        >>> torch.autograd.grad(y.sum(), x, retain_graph=True)
        (tensor([1., 1., 0.]),)
        >>> rules.rule = "guided"
        >>> torch.autograd.grad(y.sum(), x)
        (tensor([0., 1., 0.]),)
    """

    def __init__(self, rule: str = "vanilla", model: nn.Module | None = None):
        super().__init__()
        self.rule = rule
        self.relus = 0  #: number of intercepted calls of ReLUs
        self.others: Counter[tuple[str, str]] = Counter()  #: calls of other non-linearities, by (function, module)
        self._names = {id(module): name for name, module in model.named_modules()} if model is not None else {}
        self._eager: AbstractContextManager[Any] = nullcontext()

    @property
    def rule(self) -> str:
        return self._rule

    @rule.setter
    def rule(self, rule: str) -> None:
        check_rule(rule)
        self._rule = rule

    def __enter__(self) -> "ReLURules":
        # Calls in compiled code cannot be intercepted. Without dynamo, whose import takes seconds, nothing is compiled.
        self._eager = torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()
        self._eager.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._eager.__exit__(*error)

    def __torch_function__(
        self, func: Any, types: Iterable[type], args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = dict(kwargs or {})
        called = str(getattr(func, "__name__", "")).partition(".")[0]  # aten::relu.default is a relu
        x, rest = (args[0], args[1:]) if args else (options.pop("input", None), ())
        if not isinstance(x, Tensor):
            return func(*args, **(kwargs or {}))
        kind = _classify(called.strip("_"), x, rest, options)
        if kind == "other":
            self.others[called.strip("_"), self._calling_module()] += 1
        if not isinstance(kind, _ReLU) or not (torch.is_grad_enabled() and x.requires_grad):
            return func(*args, **(kwargs or {}))
        self.relus += 1
        in_place = called.endswith("_") or bool(options.get("inplace"))
        # a clamp also passes the gradient at 0, and its output does not distinguish 0 from negative inputs
        before = x.detach().clone() if in_place and kind is _CLAMP else None
        return _ApplyReLU.apply(x, lambda x: func(x, *rest, **options), kind, before, self)

    def _calling_module(self) -> str:
        """Name of the calling module, read from the call stack, so that the model needs no hooks."""
        frames = (frame for frame, _ in walk_stack(sys._getframe(2)))
        names = (self._names.get(id(frame.f_locals.get("self"))) for frame in frames if self._names)
        return next((name for name in names if name is not None), "")

    def require_relus(self, rule: str, *outputs: Tensor) -> None:
        """Raise a :class:`~eigengrain.errors.ReLURuleError` if a network has another non-linearity, or no ReLU.

        The graphs of its outputs are searched for non-linearities in compiled or scripted code. ``vanilla`` always passes.
        """
        if rule == "vanilla":
            return
        remedy = "use 'vanilla', or a backbone with ReLUs such as 'resnet50' or 'vgg16'"
        if self.others:
            calls: Counter[str] = Counter()
            for (function, _), count in self.others.items():
                calls[function] += count
            listed = ", ".join(f"{name} × {count}{self._where(name)}" for name, count in calls.most_common())
            raise ReLURuleError(rule, f"is defined for ReLUs only, and the network calls {listed}", remedy, calls)
        # the method of the class, because a Function can store its own attribute ctx.name in the same object
        names = [type(node).name(node) for node in _nodes(outputs)]
        hidden = Counter(name.rpartition("::")[2] for name in names if _HIDDEN.search(name))
        if hidden:
            listed = ", ".join(f"{name} × {count}" for name, count in hidden.items())
            problem = f"cannot be applied inside compiled or scripted parts of the network (in its graph: {listed})"
            raise ReLURuleError(rule, problem, "use plain modules, or 'vanilla'", hidden)
        if not self.relus:
            raise ReLURuleError(rule, "needs ReLUs, and the network calls none", remedy, {})

    def _where(self, function: str) -> str:
        """The modules that call a function, such as `` (backbone.act1, backbone.act2, 3 more)``."""
        names = [module for called, module in self.others if called == function and module]
        more = [f"{len(names) - 3} more"] if len(names) > 3 else []
        return f" ({', '.join(names[:3] + more)})" if names else ""


def _nodes(outputs: Iterable[Tensor]) -> Iterator[Node]:
    """Every node of the graphs of ``outputs``, once."""
    waiting, seen = [output.grad_fn for output in outputs], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        waiting.extend(before for before, _ in node.next_functions)
