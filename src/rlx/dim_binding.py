"""Binds symbolic sizes at run time and evaluates size expressions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rlx.dims import Dim, Size, Symbol, as_size, dim, dim_text, symbols_of
from rlx.errors import BindError, GraphError

# RLX's numbers of its symbols. ROWS, number 2, is batch · seq.
_NUMBERED = {0: "batch", 1: "seq", 3: "past_seq"}


def symbol_name(like: Any, where: str) -> str:
    """The name of a symbol, from its name, a Dim or its number; number 7 is the symbol `s7`."""
    if isinstance(like, int) and not isinstance(like, bool) and like >= 0:
        like = "batch*seq" if like == 2 else _NUMBERED.get(like, f"s{like}")
    if not isinstance(like, (str, Dim)):
        raise GraphError(f"{where}: {like!r} is not a symbol", hint='give its name, such as "seq", or rlx.sym.SEQ')
    name = str(like)
    if not name.isidentifier():
        raise GraphError(f"{where}: {name} is an expression, not a symbol", hint="bind its symbols instead")
    return name


class DimBinding:
    """Maps symbols to sizes. Symbols can be names or Dims."""

    def __init__(self, sizes: Mapping[str, int] | None = None) -> None:
        self._sizes: dict[str, int] = {}
        for symbol, size in (sizes or {}).items():
            self.set(symbol, size)

    @classmethod
    def batch_seq(cls, batch: int, seq: int) -> DimBinding:
        """Binds BATCH and SEQ."""
        return cls({"batch": batch, "seq": seq})

    @classmethod
    def batch_past_seq(cls, batch: int, past: int) -> DimBinding:
        """Binds BATCH and PAST_SEQ."""
        return cls({"batch": batch, "past_seq": past})

    def get(self, symbol: str | Size) -> int | None:
        """The size of a symbol (by name, Dim or number) or of an expression over bound symbols; None if unbound."""
        if isinstance(symbol, int):
            symbol = sym.ROWS if symbol == 2 else symbol_name(symbol, "binding")
        size = as_size(symbol)
        if any(s.name not in self._sizes for s in symbols_of(size)):
            return None
        return evaluate(size, self._sizes)

    def set(self, symbol: str | Size, size: int) -> DimBinding:
        """Bind one symbol; a later binding wins."""
        self._sizes[symbol_name(symbol, "binding")] = int(as_size(size))
        return self

    def items(self) -> list[tuple[str, int]]:
        """Bound symbols in alphabetical order."""
        return sorted(self._sizes.items())

    def as_dict(self) -> dict[str, int]:
        return dict(self._sizes)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, DimBinding) and self._sizes == other._sizes

    def __repr__(self) -> str:
        return "DimBinding(" + ", ".join(f"{k}={v}" for k, v in self.items()) + ")"


def evaluate(size: Size, binding: Mapping[str, int]) -> int:
    """Evaluates a size under a binding of symbol names."""
    if isinstance(size, int):
        return size
    total = 0
    for monomial, coefficient in size.terms:
        for atom in monomial:
            if isinstance(atom, Symbol):
                if atom.name not in binding:
                    raise BindError(f"dim {size}: symbol {atom.name!r} is not bound")
                coefficient *= binding[atom.name]
            else:
                a, b = evaluate(atom.a, binding), evaluate(atom.b, binding)
                if atom.op == "//" and b == 0:
                    raise BindError(f"dim {size}: {atom.b} is 0")
                coefficient *= a // b if atom.op == "//" else min(a, b) if atom.op == "min" else max(a, b)
        total += coefficient
    return total


def compile_sizes(symbols: Sequence[str], sizes: Sequence[Size]) -> Callable[..., tuple[int, ...]]:
    """Compiles a function of the symbols' values, in order, that returns all sizes: far faster than one by one."""
    names = {symbol: f"s{i}" for i, symbol in enumerate(symbols)}
    for symbol in (s for size in sizes for s in symbols_of(size) if s.name not in names):
        raise BindError(f"dim: symbol {symbol.name!r} is not among {', '.join(symbols) or 'none'}")
    body = ", ".join(dim_text(size, names) for size in sizes)
    text = f"lambda {', '.join(names.values())}: ({body}{',' if sizes else ''})"
    run: Callable[..., tuple[int, ...]] = eval(text, {"__builtins__": {}, "min": min, "max": max})

    def values(*bound: int) -> tuple[int, ...]:
        try:
            return run(*bound)
        except ZeroDivisionError:
            for size in sizes:
                evaluate(size, dict(zip(symbols, bound, strict=True)))  # names the size
            raise

    return values


class sym:
    """The symbols used by the model families. `rlx.dim("n")` makes one of your own."""

    def __init__(self, *names: Any) -> None:
        hint = f"rlx.dim({names[0]!r})" if names else "rlx.dim(name) makes a symbol"
        raise GraphError("sym: holds the symbols of models, rlx.sym.BATCH among them, and is not called", hint=hint)

    BATCH = dim("batch")
    SEQ = dim("seq")
    PAST_SEQ = dim("past_seq")
    ROWS = BATCH * SEQ
