"""The error function of vectors, and GELU."""

from __future__ import annotations

import math
from collections.abc import Callable

from rlx.backends.cpu.builder import Builder, Value, const, lanes_of
from rlx.backends.cpu.math.arithmetic import Lanes
from rlx.backends.cpu.math.conversions import nearest
from rlx.backends.cpu.targets import CpuTarget

# -- the error function -------------------------------------------------------------------------------------------
# erf(x)/x - 1 in x² for |x| <= 1: within 2^-24.6 and 2^-62.7.
_ERF_SMALL = {
    "float": (0.128379121, -0.37612325, 0.112801768, -0.0267112758, 0.0049175336, -0.000563138048),
    "double": (
        0.1283791670955126, -0.3761263890318375, 0.11283791670954857, -0.02686617064507288, 0.005223977624780734,
        -0.0008548326978735688, 0.00012055331036689117, -1.4925593502316849e-05, 1.6460972749710854e-06,
        -1.6350024560759464e-07, 1.4657875679145678e-08, -1.1365650818706664e-09, 5.945237520751989e-11,
    ),
}  # fmt: skip
# The 4th root of 1 - erf|x| in |x| (float) or |x| - 3 (double) from 1 to where erf rounds to 1, fitted so that the
# absolute error of its 4th power is within 2^-25.3 and 2^-58.5.
_ERFC_ROOT = {
    "float": (
        1.00397706, -0.302571982, -0.0740855038, -0.0405305363, 0.0606696084, -0.02045995, 0.00292793405,
        -0.00015709248,
    ),
    "double": (
        0.06855693161083354, -0.10804150263715351, 0.06872437510598253, -0.018989110228451685,
        -0.0005697796331424309, 0.001887733601007516, -0.0004110040387797218, -4.391547606709337e-05,
        3.330683658530091e-05, -3.198632968540182e-06, -1.1413131413683004e-06, 2.977951067333742e-07,
        9.11869610098389e-09, -1.2215185937104439e-08, 9.818796999317922e-10, 3.055136004222976e-10,
        -6.044418580333466e-11, -4.159761003359269e-12, 2.0726811429735687e-12, 4.0987327991188076e-14,
        -4.169519803864035e-14, -2.54878930721063e-15,
    ),
}  # fmt: skip
_ERF_ONE = {"float": 4.2, "double": 6.1}  # beyond the fits, where their 4th powers are below half an ulp of 1


def erf(b: Builder, x: Value, target: CpuTarget) -> Value:
    """The error function: an odd polynomial up to 1, beyond that 1 - p(|x|)⁴, which needs no exponential.

    Worst: float 1.7 ulp (2.2 without FMA), double 1.9 (2.3).
    """
    v = Lanes(b, x.type, target)
    size = v.magnitude(x)
    small = v.fma(size, v.polynomial(v.mul(size, size), _ERF_SMALL[v.scalar]), size)
    capped = v.at_most(size, _ERF_ONE[v.scalar])
    if v.scalar == "double":
        capped = v.sub(capped, 3.0)
    root = v.polynomial(capped, _ERFC_ROOT[v.scalar])
    square = v.mul(root, root)
    large = v.fma(b.fneg(square), square, 1.0)
    return v.with_sign_of(v.choose(v.compare("olt", size, 1.0), small, large), x)


# -- the Gaussian error linear unit ---------------------------------------------------------------------------------
# |x|·Φ(-|x|), what gelu takes off relu, around the multiples of 0.4, by rising powers of the distance to the nearest: a
# column each, of the relative error. The last is for 5.8 and beyond, where less than 2e-8 is taken off.
_GELU_LOSS = (
    (
        0, 0.1378313, 0.169484332, 0.138083622, 0.087678872, 0.0455002598, 0.0196740814, 0.00715436181,
        0.00219884049, 0.000572790974, 0.000126685147, 2.38152916e-05, 3.80800793e-06, 5.18158117e-07,
        6.00199925e-08, 0,
    ),
    (
        0.5, 0.197270319, -0.0198978148, -0.117953539, -0.122674011, -0.0852318183, -0.0455493778,
        -0.0196081623, -0.00694195041, -0.00204373361, -0.000503644231, -0.000104331448, -1.82198564e-05,
        -2.6878065e-06, -3.35447737e-07, 0,
    ),
    (
        -0.398941189, -0.338803828, -0.196993262, -0.054378178, 0.0310544726, 0.0539913177, 0.0421034135,
        0.0231142361, 0.00982272532, 0.00335313613, 0.000936695549, 0.000216441316, 4.165266e-05,
        6.70689042e-06, 9.06595346e-07, 0,
    ),
    (
        -5.30168581e-05, 0.0942629352, 0.129776672, 0.0994177684, 0.0425914973, 2.87949638e-06, -0.0157611351,
        -0.0141816745, -0.00793372095, -0.00329009583, -0.00107117812, -0.000281233835, -6.04409106e-05,
        -1.07329561e-05, -1.58480645e-06, 0,
    ),
    (
        0.0672939494, 0.0442717932, -0.000649562513, -0.032009691, -0.033819899, -0.0180221032, -0.00304894801,
        0.00341393473, 0.00367355812, 0.00207762443, 0.000833726081, 0.000257222535, 6.31758739e-05,
        1.25867364e-05, 2.0577645e-06, 0,
    ),
    (
        -0.00480941776, -0.019558616, -0.0217490569, -0.00811709464, 0.00530645344, 0.00889365189, 0.0053618988,
        0.00121076521, -0.000649055699, -0.000783599971, -0.000427048915, -0.000159725809, -4.51862143e-05,
        -1.00686893e-05, -1.80561983e-06, 0,
    ),
)  # fmt: skip
_GELU_STEP = 0.4


def gelu(b: Builder, x: Value, target: CpuTarget) -> Value:
    """x·Φ(x), Φ being the share of a normal distribution that is below x.

    Worst, of floats with AVX-512, whose registers are tables of 16: 2.8 ulp for x > -1, 3e-8 in all below. Elsewhere
    x (1 + erf(x/√2))/2, which loses digits below 0: 3.2 ulp for x > -1, 2.5e-7 below.
    """
    v = Lanes(b, x.type, target)
    if v.scalar == "float" and "+avx512f" in target.features:
        return _by_sixteen(b, x, lambda part: _gelu_by_table(Lanes(b, part.type, target), part))
    half = v.mul(x, 0.5)
    return v.fma(half, erf(b, v.mul(x, math.sqrt(0.5)), target), half)


def _gelu_by_table(v: Lanes, x: Value) -> Value:
    b = v.b
    size = v.at_most(v.magnitude(x), 15 * _GELU_STEP)
    which = nearest(b, v.mul(size, 1 / _GELU_STEP), v.target)
    distance = v.fma(b.convert("sitofp", which, v.type), -_GELU_STEP, size)
    loss: Value | None = None
    for row in reversed(_GELU_LOSS):
        register = Value(v.type, f"<{', '.join(str(const(v.scalar, number)) for number in row)}>")
        coefficient = b.call(v.type, "llvm.x86.avx512.permvar.sf.512", register, which)
        loss = coefficient if loss is None else v.fma(loss, distance, coefficient)
    assert loss is not None
    # Below zero x·0 and not 0, since x·Φ(x) is NaN at -∞ on every target.
    return v.sub(v.choose(v.compare("ogt", x, 0.0), x, v.mul(x, 0.0)), loss)


def _by_sixteen(b: Builder, x: Value, function: Callable[[Value], Value]) -> Value:
    """A function of 16 lanes on any number of them."""
    lanes = lanes_of(x.type)
    if lanes > 16:
        halves = [b.shuffle(x, x, part) for part in (range(lanes // 2), range(lanes // 2, lanes))]
        low, high = (_by_sixteen(b, half, function) for half in halves)
        return b.shuffle(low, high, range(lanes))
    if lanes == 16:
        return function(x)
    wide = function(b.shuffle(x, x, [i % lanes for i in range(16)]))
    return b.shuffle(wide, wide, range(lanes))
