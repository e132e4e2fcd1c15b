"""Checks and defaults of the settings of `rlx.load`."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlx.dtypes import BF16, F16, FLOAT8_PACKED
from rlx.engine.sampler import short_repr
from rlx.errors import CapabilityError, RequestError
from rlx.profile import CompileProfile, Precision
from rlx.runtime.session import Session
from rlx.target import Target

if TYPE_CHECKING:
    from rlx.engine.model import ModelInfo
    from rlx.models.load import Checkpoint

CONTEXT = 4096  # default limit in tokens
PROFILE = "profile.toml"  # in a model's folder: its compile profile


def session_for(device: str, threads: int | None) -> Session:
    session = Session(device, threads=threads)
    if session.device.backend.interprets:
        hint = "rlx verify MODEL compares a model with the reference, op by op"
        raise CapabilityError(f"load: device {device!r} is the reference for graphs and does not run models", hint=hint)
    return session


def choose(setting: str, value: str, known: Sequence[str], of: str = "") -> str:
    if value not in known:
        raise CapabilityError(f"load: {setting} {value!r} is not supported{of}", hint=f"there is: {', '.join(known)}")
    return value


def profile_for(profile: CompileProfile | str | Path | None, model: Path) -> CompileProfile:
    """The requested profile, or the one in the model's folder."""
    if isinstance(profile, CompileProfile):
        return profile
    if profile is None:
        path = (model if model.is_dir() else model.parent) / PROFILE
        return CompileProfile.from_toml(path) if path.is_file() else CompileProfile()
    if isinstance(profile, str) and not profile.endswith(".toml"):
        return CompileProfile.preset(profile)
    if not isinstance(profile, (str, Path)):
        raise RequestError(
            f"load: profile is {short_repr(profile)}, expected a profile, a preset's name or a TOML file"
        )
    return CompileProfile.from_toml(profile)


def with_precision(profile: CompileProfile, precision: str) -> CompileProfile:
    """The profile with the requested precision; auto keeps its own."""
    chosen = profile.precision if precision == "auto" else Precision(precision)
    if chosen.activations == "auto":  # the fastest for quantised weights, unless f32 is requested
        chosen = replace(chosen, activations="f32" if precision == "f32" else "int8")
    return replace(profile, precision=chosen)


def auto_cache(checkpoint: Checkpoint, profile: CompileProfile, target: Target | None = None) -> str:
    """The default type of keys and values.

    That of 16-bit weights if the target multiplies in it, f16 if quantised weights meet int8 activations, else f32.
    """
    weights = checkpoint.weights
    kinds = {weights.type(key).dtype for key in weights.keys()}  # noqa: SIM118  it is no mapping
    narrow = [kind for kind in (BF16, F16) if kind in kinds and target is not None and target.multiplied(kind) is kind]
    if narrow and profile.precision.activations != "f32":
        return narrow[0].name
    # 8-bit floats are multiplied in f32
    packed = any(kind.is_packed and kind not in FLOAT8_PACKED for kind in kinds)
    return "f16" if packed and profile.precision.activations == "int8" else "f32"


def checked_context(context: int | None, facts: ModelInfo) -> int:
    longest = facts.longest
    if context is None:
        return default_context(facts.kind, longest)
    requested = as_int(context)
    if requested is None or requested < 1:
        raise RequestError(f"load: context is {short_repr(context)}, expected a whole number from 1")
    if requested > longest:
        raise RequestError(f"load: context {short_repr(requested)} is asked for, the model has {longest}")
    return requested


def default_context(kind: str, longest: int) -> int:
    """The context if none is requested: limited for decoders, whose KV cache takes memory per position."""
    return min(CONTEXT, longest) if kind == "decoder" else longest


def as_int(value: Any) -> int | None:
    """The value as an int if it is an integer, including NumPy's; otherwise None."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None
