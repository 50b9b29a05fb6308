r"""How a gradient passes a rectifier: plain backpropagation, the rule of DeConvNet, or both masks at once.

With y = max(x, 0) and g the gradient that arrives at y, the one that goes on to x is

.. math:: g\,[x > 0] \ \text{(vanilla)}, \qquad g\,[g > 0] \ \text{(deconv, Eq. 7)}, \qquad g\,[x > 0]\,[g > 0]
   \ \text{(guided)}.

Eq. 6 of the paper prints vanilla as 1 where the gradient is positive, which is the derivative of nothing; here it is plain
backpropagation [1]. Nothing is hooked to the network: the calls of its forward pass are watched while it runs.

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
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.function import FunctionCtx
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode

from eigengrain.errors import UnknownName

RULES = ("vanilla", "deconv", "guided")

#: non-linearities by the name of their function, under which torch has them as F.*, torch.* and methods, in place or not
_OTHERS = frozenset(
    "gelu silu hardswish hardsigmoid sigmoid special_expit tanh softmax special_softmax log_softmax softmin gumbel_softmax "
    "elu selu celu leaky_relu prelu rrelu mish softplus softsign softshrink hardshrink tanhshrink logsigmoid log_sigmoid "
    "glu scaled_dot_product_attention multi_head_attention_forward".split()
)

#: steps of the backward pass that are, or may hide, a non-linearity whose call was not seen: compiled and scripted code
_UNSEEN = re.compile(
    r"(CompiledFunction|DifferentiableGraph|Relu|Threshold|Hardtanh|Gelu|Silu|Hardswish|Hardsigmoid|Sigmoid|Tanh|Softmax|"
    r"Elu|Celu|LeakyRelu|PreluKernel|RreluWithNoise|Mish|Softplus)Backward\d*$"
)

#: places that a message names for each non-linearity
_PLACES = 3


def check_rule(rule: str) -> None:
    if rule not in RULES:
        raise UnknownName("rule", rule, RULES)


class _Rectifier(NamedTuple):
    """A function that is x above 0 and 0 below: its derivative times a gradient, and at what that is looked up."""

    derivative: Callable[[Tensor, Tensor], Tensor]
    at: Literal["input", "output"]


# Each keeps what PyTorch's own operation keeps, and uses its kernel: the same memory, the same numbers under vanilla, and
# nothing more that a later step in place could overwrite.
_RELU = _Rectifier(lambda gradient, y: torch.ops.aten.threshold_backward(gradient, y, 0), "output")
_THRESHOLD = _Rectifier(lambda gradient, x: torch.ops.aten.threshold_backward(gradient, x, 0), "input")
_CLAMP = _Rectifier(lambda gradient, x: torch.where(x >= 0, gradient, 0.0), "input")


def _clipped(cap: float) -> _Rectifier:
    return _Rectifier(lambda gradient, x: torch.ops.aten.hardtanh_backward(gradient, x, 0, cap), "input")


def _read(name: str, x: Tensor, rest: tuple[Any, ...], options: dict[str, Any]) -> _Rectifier | Literal["other"] | None:
    """What a call is: a rectifier, another non-linearity, or neither."""

    def option(place: int, key: str, default: Any = None) -> Any:
        return rest[place] if len(rest) > place else options.get(key, default)

    if name == "relu":
        return _RELU
    if name == "relu6":
        return _clipped(6.0)
    if name == "hardtanh":
        low, high = option(0, "min_val", -1.0), option(1, "max_val", 1.0)
        return _clipped(high) if low == 0 else "other"
    if name == "threshold":
        return _THRESHOLD if option(0, "threshold") == 0 and option(1, "value") == 0 else "other"
    if name in ("clamp", "clip", "clamp_min"):
        # Of a map only: elsewhere it guards a division or a root. With two bounds it is how hard sigmoids are written.
        low = option(0, "min")
        if x.ndim != 4 or not isinstance(low, int | float) or low != 0:
            return None
        return _CLAMP if name == "clamp_min" or option(1, "max") is None else "other"
    return "other" if name in _OTHERS else None


class _Rectify(torch.autograd.Function):
    """A rectifier whose backward pass asks for the rule at the time it runs, so that one forward pass serves all rules."""

    @staticmethod
    def forward(
        x: Tensor,
        compute: Callable[[Tensor], Tensor],
        rectifier: _Rectifier,
        before: Tensor | None,
        rules: "RectifierRules",
    ) -> Tensor:
        return compute(x)

    @staticmethod
    def setup_context(ctx: FunctionCtx, inputs: tuple[Any, ...], output: Any) -> None:
        x, _, rectifier, before, rules = inputs
        in_place = output is x
        if in_place:
            ctx.mark_dirty(x)
        ctx.save_for_backward(before if before is not None else x if rectifier.at == "input" and not in_place else output)
        ctx.rectifier, ctx.rules = rectifier, rules  # type: ignore[attr-defined]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        (at,) = ctx.saved_tensors
        rule = ctx.rules.rule
        onward = gradient if rule == "deconv" else ctx.rectifier.derivative(gradient, at)
        return onward if rule == "vanilla" else onward.clamp_min(0), None, None, None, None


class RectifierRules(TorchFunctionMode):
    """Context in which a network runs forward, so that its rectifiers follow :attr:`rule` in every later backward pass.

    Rectifiers are ``relu`` however it is called, ``threshold`` at 0, the clipped ``relu6`` and ``hardtanh`` from 0, and
    ``clamp`` of a map (B, C, H, W) from 0 without an upper bound. DeConv, as printed, looks at the gradient alone, so it
    passes a clipped rectifier above its cap as well. Max-pooling routes its gradient as it does. What is not written as a
    call, such as ``x * (x > 0)``, is not seen.

    Args:
        rule: ``vanilla``, ``deconv`` or ``guided``; may be set between backward passes.
        model: whose modules the error of :meth:`require_rectifiers` names.

    Attributes:
        rectifiers: how many calls of a rectifier were seen.
        others: how many calls of other non-linearities, by (function, module).

    Example:
        >>> x = torch.tensor([-1.0, 2.0, 3.0], requires_grad=True)
        >>> with RectifierRules("deconv") as rules:
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
        self.rectifiers = 0
        self.others: Counter[tuple[str, str]] = Counter()
        self._model = model
        self._names: dict[int, str] | None = None
        self._eager: AbstractContextManager[Any] = nullcontext()

    @property
    def rule(self) -> str:
        return self._rule

    @rule.setter
    def rule(self, rule: str) -> None:
        check_rule(rule)
        self._rule = rule

    def __enter__(self) -> "RectifierRules":
        # A compiled part would run the code it was compiled to, past any watching. Nothing is compiled before dynamo is
        # loaded, which takes seconds.
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
        found = _read(called.strip("_"), x, rest, options)
        if found == "other":
            self.others[called.strip("_"), self._calling_module()] += 1
        if not isinstance(found, _Rectifier) or not (torch.is_grad_enabled() and x.requires_grad):
            return func(*args, **(kwargs or {}))
        self.rectifiers += 1
        in_place = called.endswith("_") or bool(options.get("inplace"))
        # a clamp passes the gradient at 0 too, where its output no longer tells 0 from what was below
        before = x.detach().clone() if in_place and found is _CLAMP else None
        return _Rectify.apply(x, lambda x: func(x, *rest, **options), found, before, self)

    def _calling_module(self) -> str:
        """Name of the module whose code made the call, found on the stack: a hook would have to be put on the model."""
        if self._model is None:
            return ""
        if self._names is None:
            self._names = {id(module): name for name, module in self._model.named_modules()}
        frame = sys._getframe(2)
        while frame is not None:
            name = self._names.get(id(frame.f_locals.get("self")))
            if name is not None:
                return name
            frame = frame.f_back  # type: ignore[assignment]
        return ""

    def require_rectifiers(self, rule: str, *outputs: Tensor) -> None:
        """Refuse a network that a rule other than vanilla is not defined for.

        Args:
            rule: that is asked for.
            outputs: of the network, whose graphs are searched for non-linearities inside compiled or scripted code.

        Raises:
            ValueError: with what was found and where, if a non-linearity is no rectifier, or none is a rectifier.
        """
        if rule == "vanilla":
            return
        remedy = "use rule='vanilla' (--rules vanilla), or a ReLU backbone such as 'resnet50' or 'vgg16'"
        if self.others:
            raise ValueError(
                f"rule={rule!r} is defined at rectifiers (ReLU) alone, and the network also calls {self._listed()}: "
                + remedy
            )
        # asked of the class: a Function may keep something of its own under ctx.name, which is the same object
        names = [type(node).name(node) for node in _nodes(outputs)]
        unseen = Counter(name for name in names if _UNSEEN.search(name))
        if unseen:
            listed = ", ".join(f"{name.rpartition('::')[2]} × {count}" for name, count in unseen.items())
            raise ValueError(
                f"rule={rule!r} cannot reach into compiled or scripted parts of the network (in its graph: {listed}): use "
                "the network as plain modules, or rule='vanilla'"
            )
        if not self.rectifiers:
            raise ValueError(
                f"rule={rule!r} differs from the plain gradient at rectifiers (ReLU) alone, and the network calls none: "
                + remedy
            )

    def _listed(self) -> str:
        """Such as ``silu × 3 (backbone.act1, backbone.act2)``, the most frequent first."""
        calls: Counter[str] = Counter()
        places: dict[str, list[str]] = {}
        for (function, module), count in self.others.items():
            calls[function] += count
            places.setdefault(function, [])
            if module:
                places[function].append(module)

        def where(names: list[str]) -> str:
            more = [f"{len(names) - _PLACES} more"] if len(names) > _PLACES else []
            return f" ({', '.join(names[:_PLACES] + more)})" if names else ""

        return ", ".join(f"{function} × {count}{where(places[function])}" for function, count in calls.most_common())


def _nodes(outputs: Iterable[Tensor]) -> Iterator[Node]:
    """Every step of the backward pass from ``outputs``, once."""
    waiting, seen = [output.grad_fn for output in outputs], set()
    while waiting:
        node = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        yield node
        waiting.extend(before for before, _ in node.next_functions)
