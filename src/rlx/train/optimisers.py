"""Optimisers: the moments of each parameter, the scalars of a step, and the update of a parameter.

An optimiser is data and two functions, so you can write your own with `Optimiser(...)`: its `update` builds ordinary
ops and ends in `assign`, or in a custom op.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from typing import TYPE_CHECKING, Any, NoReturn

from rlx.errors import RequestError, UnknownAttribute
from rlx.fast_dataclass import dataclass
from rlx.flow.patterns import matches_name
from rlx.ir.graph import Value
from rlx.train.schedules import Schedule

Numbers = Callable[[int, float], Mapping[str, float]]
Update = Callable[[Value, Mapping[str, Value], Value, Mapping[str, Value], Value | None], Sequence[Value]]


@dataclass(frozen=True)
class Optimiser:
    """An update rule for parameters.

    `moments` names the state of each parameter: tensors of its type, initially zero. `numbers(t, lr)` returns the
    scalars of step t = 1, 2, ..., which all parameters share; they are run-time inputs, so a learning rate schedule
    does not recompile. `update(param, moments, grad, numbers, scale)` builds the update of one parameter and returns
    the new parameter and then its new moments; each is a state, updated in place. `scale` multiplies a clipped
    gradient; None without clipping. `patterns` are those of its settings; each must match a trained parameter.
    """

    name: str
    lr: float | Schedule
    moments: tuple[str, ...]
    numbers: Numbers
    update: Update
    patterns: tuple[str, ...] = ()
    settings: Mapping[str, Any] = field(default_factory=dict)  # for `repr`

    def __repr__(self) -> str:
        return f"{self.name}({self.lr!r}{''.join(f', {name}={value!r}' for name, value in self.settings.items())})"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> NoReturn:
            """Raise, with a hint for the methods of optimisers in other libraries."""
            if name not in ("init", "apply", "apply_gradients", "step", "zero_grad", "state_dict"):
                raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}")
            hint = (
                "rlx.train.step(loss, optimiser) trains a graph or a flow; docs/coming-from-jax.md has Adam for trees"
            )
            raise UnknownAttribute(f"{name}: {type(self).__name__} has no such attribute", hint=hint)


def adamw(
    lr: float | Schedule = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8,
    weight_decay: float | Mapping[str, float] = 0.01,
) -> Optimiser:  # fmt: skip
    """AdamW (Loshchilov and Hutter, 2019): Adam with decoupled weight decay, as in torch.

    `lr` is a number or a schedule, such as `rlx.train.cosine(3e-4, steps=1000, warmup=100)`. `weight_decay` is a number
    for all params, or numbers by patterns of their names, of which the first that matches counts and 0 is for the
    others: `{"*norm*": 0, "*bias": 0, "*": 0.1}` decays neither norms nor biases. `*` matches anything, dots included,
    in upper or lower case.
    """
    _check_rate("adamw", lr)
    _check_non_negative("adamw", eps=eps)
    decays = Decays.of("adamw", weight_decay)
    beta1, beta2 = betas
    for name, beta in (("betas[0]", beta1), ("betas[1]", beta2)):
        _check_fraction("adamw", name, beta)

    def numbers(t: int, rate: float) -> Mapping[str, float]:
        root = math.sqrt(1 - beta2**t)
        factors = {decays.name(decay): 1 - rate * decay for decay in decays.values}
        return {"rate": rate / (1 - beta1**t), **factors, "root": root}

    def update(
        p: Value, moments: Mapping[str, Value], grad: Value, n: Mapping[str, Value], scale: Value | None
    ) -> Sequence[Value]:
        decay = n[decays.name(decays.of_param(p))]
        operands = (p, moments["m"], moments["v"], grad, n["rate"], decay, n["root"], scale)
        return p.graph.build("adamw_update", operands, {"beta1": beta1, "beta2": beta2, "eps": eps}).results

    settings = {"betas": betas, "eps": eps, "weight_decay": weight_decay}
    return Optimiser("adamw", lr, ("m", "v"), numbers, update, decays.patterns, settings)


def sgd(
    lr: float | Schedule = 1e-2, momentum: float = 0.0, *, nesterov: bool = False,
    weight_decay: float | Mapping[str, float] = 0.0,
) -> Optimiser:  # fmt: skip
    """Gradient descent with optional momentum, as in torch; `lr` and `weight_decay` are as in `adamw`."""
    _check_rate("sgd", lr)
    decays = Decays.of("sgd", weight_decay)
    _check_fraction("sgd", "momentum", momentum)
    if nesterov and not momentum:
        raise RequestError("sgd: nesterov needs a momentum, which is 0")

    def update(
        p: Value, moments: Mapping[str, Value], grad: Value, n: Mapping[str, Value], scale: Value | None
    ) -> Sequence[Value]:
        attrs = {"momentum": momentum, "nesterov": nesterov, "weight_decay": decays.of_param(p)}
        return p.graph.build("sgd_update", (p, grad, n["rate"], moments.get("velocity"), scale), attrs).results

    moments = ("velocity",) if momentum else ()
    settings = {"momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}
    return Optimiser("sgd", lr, moments, lambda t, rate: {"rate": rate}, update, decays.patterns, settings)


@dataclass(frozen=True)
class Decays:
    """The weight decay of each param, by patterns of names."""

    rules: tuple[tuple[str, float], ...]

    @classmethod
    def of(cls, where: str, weight_decay: float | Mapping[str, float]) -> Decays:
        """Check a number for all params, or numbers by pattern."""
        rules = weight_decay if isinstance(weight_decay, Mapping) else {"*": weight_decay}
        if callable(weight_decay):
            hint = 'numbers by pattern of names: {"*norm*": 0, "*bias": 0, "*": 0.1}'
            raise RequestError(f"{where}: weight_decay is a function, expected a number or a mapping", hint=hint)
        for pattern, decay in rules.items():
            _check_non_negative(where, **{"weight_decay" if len(rules) == 1 else f"weight_decay of {pattern!r}": decay})
        return cls(tuple((str(pattern), decay) for pattern, decay in rules.items()))

    @property
    def values(self) -> list[float]:
        """All distinct numbers; 0 for params that no pattern matches."""
        return list(dict.fromkeys([*(decay for _, decay in self.rules), *([] if self.covers_all else [0.0])]))

    @property
    def patterns(self) -> tuple[str, ...]:
        """All patterns of names."""
        return tuple(pattern for pattern, _ in self.rules)

    @property
    def covers_all(self) -> bool:
        return any(pattern == "*" for pattern, _ in self.rules)

    def name(self, decay: float) -> str:
        """The name of the scalar by which params with this decay are multiplied."""
        at = self.values.index(decay)
        return f"decay{at or ''}"

    def of_param(self, param: Value) -> float:
        """The weight decay of a param of a step."""
        name = str(param.node.attrs["name"])
        return next((decay for pattern, decay in self.rules if matches_name(name, pattern)), 0.0)


def _check_rate(where: str, lr: Any) -> None:
    if not callable(lr):
        _check_non_negative(where, lr=lr)


def _check_non_negative(where: str, **numbers: Any) -> None:
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise RequestError(f"{where}: {name} is {value!r}, expected a number from 0")


def _check_fraction(where: str, name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise RequestError(f"{where}: {name} is {value!r}, expected 0 to below 1")
