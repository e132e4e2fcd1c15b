"""Vector transcendentals and number conversions, written out as instructions. `FUNCTIONS` has the transcendentals.

Each function takes a builder and values of any width (`<1 x float>` to `<16 x double>` and beyond) and gives back the
result value. Nothing branches, nothing reads memory and nothing becomes a call, on any target, except for sines,
cosines and tangents of large angles; the bits of a lane do not depend on how many lanes there are.

Errors are in ulp of the result, the worst of sweeps of millions of arguments over all exponents. The polynomials are
our own minimax fits: a Remez exchange in 50-digit arithmetic on the reduced interval, of the relative error of the
result unless said otherwise; `float` coefficients were then moved by hill climbing over neighbouring floats until the
rounded polynomial was as good as the ideal one. All lists start at the lowest power.
"""

from __future__ import annotations

from collections.abc import Callable

from rlx.backends.cpu.builder import Value
from rlx.backends.cpu.math.error_function import erf, gelu
from rlx.backends.cpu.math.exponential import exp, log, pow, tanh
from rlx.backends.cpu.math.trigonometry import atan, cos, sin, tan

# The transcendental scalar operations of loop kernels, by name: (builder, *operands, target) -> result.
FUNCTIONS: dict[str, Callable[..., Value]] = {
    f.__name__: f for f in (exp, log, tanh, erf, gelu, sin, cos, tan, atan, pow)
}
