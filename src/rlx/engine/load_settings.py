"""Settings of `rlx.load`: their checks, and what they are where nobody says."""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rlx.dtypes import FLOAT8_PACKED
from rlx.engine.sampler import shown
from rlx.errors import CapabilityError, RequestError
from rlx.profile import CompileProfile, Precision
from rlx.runtime.session import Session

if TYPE_CHECKING:
    from rlx.engine.model import ModelInfo
    from rlx.models.load import Checkpoint

CONTEXT = 4096  # positions, where the model has more and nothing else is asked
PROFILE = "profile.toml"  # beside a model, says how it is compiled


def session_for(device: str, threads: int | None) -> Session:
    session = Session(device, threads=threads)
    if session.device.backend.interprets:
        hint = "rlx verify MODEL compares a model with the reference, op by op"
        raise CapabilityError(f"load: device {device!r} is the oracle for graphs, and runs no models", hint=hint)
    return session


def choose(what: str, given: str, known: Sequence[str], of: str = "") -> str:
    if given not in known:
        raise CapabilityError(f"load: {what} {given!r} is not supported{of}", hint=f"there is: {', '.join(known)}")
    return given


def profile_for(given: CompileProfile | str | Path | None, model: Path) -> CompileProfile:
    """What was asked for, or the file beside the model."""
    if isinstance(given, CompileProfile):
        return given
    if given is None:
        beside = (model if model.is_dir() else model.parent) / PROFILE
        return CompileProfile.from_toml(beside) if beside.is_file() else CompileProfile()
    if isinstance(given, str) and not given.endswith(".toml"):
        return CompileProfile.preset(given)
    if not isinstance(given, (str, Path)):
        raise RequestError(f"load: profile is {shown(given)}, expected a profile, a preset's name or a TOML file")
    return CompileProfile.from_toml(given)


def with_precision(profile: CompileProfile, asked: str) -> CompileProfile:
    """The profile, which is overruled where a precision is asked for."""
    chosen = profile.precision if asked == "auto" else Precision(asked)
    if chosen.activations == "auto":  # as fast as packed weights allow, unless it is to be exact
        chosen = replace(chosen, activations="f32" if asked == "f32" else "int8")
    return replace(profile, precision=chosen)


def auto_cache(checkpoint: Checkpoint, profile: CompileProfile) -> str:
    """What keys and values are kept in where nobody says: half precision where products are rounded more than that."""
    weights = checkpoint.weights
    kinds = {weights.type(key).dtype for key in weights.keys()}  # noqa: SIM118  it is no mapping
    # products by 8-bit floats are those of f32
    packed = any(kind.is_packed and kind not in FLOAT8_PACKED for kind in kinds)
    return "f16" if packed and profile.precision.activations == "int8" else "f32"


def checked_context(context: int | None, facts: ModelInfo) -> int:
    longest = facts.longest
    if context is None:
        return default_context(facts.kind, longest)
    asked = whole(context)
    if asked is None or asked < 1:
        raise RequestError(f"load: context is {shown(context)}, expected a whole number from 1")
    if asked > longest:
        raise RequestError(f"load: context {shown(asked)} is asked for, the model has {longest}")
    return asked


def default_context(kind: str, longest: int) -> int:
    """A cache takes memory for each position; without one, any text may be as long as it can."""
    return min(CONTEXT, longest) if kind == "decoder" else longest


def whole(value: Any) -> int | None:
    """A whole number, NumPy's among them; None for all else."""
    try:
        return None if isinstance(value, bool) else operator.index(value)
    except TypeError:
        return None
