"""Optimisers: what is kept for each parameter, the numbers of a step, and how a parameter changes.

An optimiser is data and two functions, so one that is not here is written with `Optimiser(...)`: its `update` builds
ordinary ops and ends in `assign`, or in an op of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rlx.errors import RequestError
from rlx.ir.graph import Value

Numbers = Callable[[int, float], Mapping[str, float]]
Update = Callable[[Value, Mapping[str, Value], Value, Mapping[str, Value], Value | None], Sequence[Value]]


@dataclass(frozen=True)
class Optimiser:
    """How parameters follow gradients.

    `moments` names what is kept for each parameter: tensors of its type, zeros at first. `numbers(t, lr)` gives the
    scalars of step t = 1, 2, ..., the same for all parameters; they come as run-time inputs, so that a schedule of
    learning rates compiles once. `update(param, moments, grad, numbers, scale)` builds the step of one parameter and
    gives the values after it, the parameter's first and then those of its moments; each is its state, changed in
    place. `scale` multiplies the gradient where it is clipped, None elsewhere.
    """

    name: str
    lr: float
    moments: tuple[str, ...]
    numbers: Numbers
    update: Update


def adamw(
    lr: float = 1e-3, betas: tuple[float, float] = (0.9, 0.999), eps: float = 1e-8, weight_decay: float = 0.01
) -> Optimiser:
    """AdamW (Loshchilov and Hutter, 2019): Adam whose weight decay is apart from the gradient, as torch has it."""
    _from_zero("adamw", lr=lr, eps=eps, weight_decay=weight_decay)
    beta1, beta2 = betas
    for name, beta in (("betas[0]", beta1), ("betas[1]", beta2)):
        _share("adamw", name, beta)

    def numbers(t: int, rate: float) -> Mapping[str, float]:
        root = math.sqrt(1 - beta2**t)
        return {"rate": rate / (1 - beta1**t), "decay": 1 - rate * weight_decay, "root": root}

    def update(
        p: Value, moments: Mapping[str, Value], grad: Value, n: Mapping[str, Value], scale: Value | None
    ) -> Sequence[Value]:
        operands = (p, moments["m"], moments["v"], grad, n["rate"], n["decay"], n["root"], scale)
        return p.graph.build("adamw_update", operands, {"beta1": beta1, "beta2": beta2, "eps": eps}).results

    return Optimiser("adamw", lr, ("m", "v"), numbers, update)


def sgd(lr: float = 1e-2, momentum: float = 0.0, *, nesterov: bool = False, weight_decay: float = 0.0) -> Optimiser:
    """Gradient descent, with momentum if asked for, as torch has it."""
    _from_zero("sgd", lr=lr, weight_decay=weight_decay)
    _share("sgd", "momentum", momentum)
    if nesterov and not momentum:
        raise RequestError("sgd: nesterov needs a momentum, which is 0")
    attrs = {"momentum": momentum, "nesterov": nesterov, "weight_decay": weight_decay}

    def update(
        p: Value, moments: Mapping[str, Value], grad: Value, n: Mapping[str, Value], scale: Value | None
    ) -> Sequence[Value]:
        return p.graph.build("sgd_update", (p, grad, n["rate"], moments.get("velocity"), scale), attrs).results

    return Optimiser("sgd", lr, ("velocity",) if momentum else (), lambda t, rate: {"rate": rate}, update)


def _from_zero(where: str, **numbers: Any) -> None:
    for name, value in numbers.items():
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < math.inf:
            raise RequestError(f"{where}: {name} is {value!r}, wanted a number from 0")


def _share(where: str, name: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value < 1:
        raise RequestError(f"{where}: {name} is {value!r}, wanted 0 to below 1")
