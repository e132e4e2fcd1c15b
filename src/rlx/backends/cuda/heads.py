"""Heads: attention of one token prepares its own queries, keys and values, instead of waiting for another launch.

The chain before it normalises and rotates heads, and appends keys and values. Here the blocks of a head run its pieces
themselves, bit by bit: each block those of the queries, the block with the newest key also those of keys and values.
What only they read stays in shared memory.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from rlx.backends.cuda.chains import ChainKernel, Piece
from rlx.backends.cuda.kernel_plan import EXTRA_WORDS, KernelPlan, entry
from rlx.backends.cuda.loops.emitter import WARP, Emitter, Variant
from rlx.backends.cuda.loops.footprints import footprints
from rlx.backends.cuda.sized import Sizes, with_sizes
from rlx.backends.cuda.targets import CudaTarget
from rlx.fast_dataclass import dataclass
from rlx.lir.kernels import AttentionKernel
from rlx.lir.program import ARENA, Program
from rlx.types import evaluate

if TYPE_CHECKING:
    from rlx.backends.cuda.launch_plan import PlannedLaunch

THREADS = 128  # of a block of attention
MOST_ROWS = 16  # queries of a head of keys: one tile
MOST_SHARED = 8 << 10  # bytes of prepared heads


@dataclass(frozen=True)
class Part:
    """How blocks run a piece of the chain."""

    groups: int  # of a block: those of the heads of its queries, or one
    every: bool  # by every block of a head, not just by the one with the newest key
    level: int  # pieces of a level run at the same time
    first: int  # of its threads
    threads: int
    moved: tuple[tuple[str, int, int], ...]  # operands in shared memory: name, offset there, and bytes per group


@dataclass(frozen=True)
class HeadsKernel:
    """A chain that prepares heads, and the attention that reads them."""

    chain: ChainKernel
    parts: tuple[Part, ...]  # by piece
    attention: AttentionKernel
    queries: tuple[int, int, int]  # offset in shared memory, bytes per group, groups of a block
    sizes: Sizes  # words of attention that are constants

    kind = "heads"

    @property
    def words(self) -> tuple[str, ...]:
        """Those of the pieces, then those of attention."""
        ends = len(self.chain.tracks)
        return (*self.chain.words[:-ends], *self.attention.words, *EXTRA_WORDS)

    @property
    def fault_words(self) -> tuple[int, ...]:
        return tuple(i for i, name in enumerate(self.words) if name == "fault" or name.startswith("fault."))

    @property
    def symbol(self) -> str:
        text = f"{self.chain.symbol} {self.parts} {self.attention.fingerprint} {self.queries} {self.sizes}"
        return f"heads.{hashlib.blake2b(text.encode(), digest_size=4).hexdigest()}"


# -- code -------------------------------------------------------------------------------------------------------------
class HeadsGenerator:
    """Writes CUDA C for attention that prepares its heads; variants are those of attention."""

    def plan(self, kernel: HeadsKernel, words: Mapping[str, int], target: CudaTarget) -> KernelPlan:
        raise AssertionError("plans of prepared heads are made by `fuse_heads`")

    def source(self, kernel: HeadsKernel, variant: str, target: CudaTarget) -> str:
        from rlx.backends.cuda.attention.generator import AttentionGenerator

        functions: list[str] = []
        fields: list[str] = []
        fetches: list[str] = []
        for i, (piece, part) in enumerate(zip(kernel.chain.pieces, kernel.parts, strict=True)):
            name = _function(piece, i)
            text = with_sizes(
                Emitter(piece.kernel, Variant.parse(piece.variant), name, ranged=True).source(), piece.sizes
            )
            text = text.replace("threadIdx.x", f"(threadIdx.x - {part.first}u)").replace(
                "blockDim.x", str(part.threads)
            )
            functions.append(text)
            fields += [f"  Words_{name} p{i};", f"  i64 share{i};"]
            fields += [f"  i64 bytes{i}_{operand};" for operand in piece.fetched]
            fetches += [f"  fetch(all.p{i}.{operand}, all.bytes{i}_{operand});" for operand in piece.fetched]
        at, size, groups = kernel.queries
        lines = [
            *functions,
            "struct All {", *fields, "  Words attention;", "};",
            "INLINE const Words& words_of(const All& all) { return all.attention; }",
            "INLINE void fetch_for_heads(const All& all) {", *fetches, "}",
            "INLINE void prepare_heads(const All& all, u8* prepared, i32 head, bool has_newest) {",
        ]  # fmt: skip
        for level in range(1 + max(part.level for part in kernel.parts)):
            for i, part in enumerate(kernel.parts):
                if part.level == level:
                    lines += _call(kernel.chain.pieces[i], part, i)
            lines.append("  __syncthreads();")
        moved = _moved("all.attention.q", at, size, groups)
        lines += [
            "}", "INLINE const Query* queries_of(const All& all, u8* prepared, i32 head) {",
            f"  return (const Query*)({moved});", "}",
        ]  # fmt: skip
        own = entry(kernel, variant)
        source = AttentionGenerator().source_with_heads(kernel.attention, variant, target, own, "\n".join(lines))
        return with_sizes(source, kernel.sizes)


def _function(piece: Piece, i: int) -> str:
    return f"{piece.function}_{i}"


def _call(piece: Piece, part: Part, i: int) -> list[str]:
    kind = "i32" if Variant.parse(piece.variant).narrow else "i64"
    begin = f"({kind})(head * {part.groups} * all.share{i})"
    who = "" if part.every else "has_newest && "
    moved = [f"    p.{name} = (decltype(p.{name}))({_moved(f'all.p{i}.{name}', at, size, part.groups)});"
             for name, at, size in part.moved]  # fmt: skip
    return [
        f"  if ({who}threadIdx.x - {part.first}u < {part.threads}u) {{",
        f"    Words_{_function(piece, i)} p = all.p{i};",
        *moved,
        f"    {_function(piece, i)}(p, {begin}, {begin} + ({kind})({part.groups} * all.share{i}));",
        "  }",
    ]


def _moved(word: str, at: int, size: int, groups: int) -> str:
    """Where an operand would begin if the groups of this block were in shared memory; its word is an offset."""
    return f"prepared + {at} - (i64)head * {groups * size} + (i64){word}"


# -- plans ------------------------------------------------------------------------------------------------------------
def fuse_heads(
    planned: Sequence[PlannedLaunch], program: Program, sizes: Mapping[str, int], target: CudaTarget
) -> list[PlannedLaunch]:
    """Replaces each chain that prepares the heads of the next attention, and that attention, by one launch."""
    fused = list(planned)
    if target.capability < 90:
        return fused
    edges = {edge for control in program.controls for edge in control.edges}
    chain: PlannedLaunch | None = None
    known: dict[tuple[object, ...], _Shape | None] = {}
    for i, launch in enumerate(planned):
        if i in edges:
            chain = None
        if not launch.plan.passes:
            continue
        if chain is not None and _is_single_token(launch):
            heads = _Heads(chain, launch, program, sizes, target)
            key = heads.key()
            if key not in known:
                known[key] = heads.shape()
            shape = known[key]
            if shape is not None:
                fused[chain.number] = replace(chain, plan=KernelPlan(()))
                fused[i] = heads.launch(shape)
        chain = launch if isinstance(launch.kernel, ChainKernel) else None
    return fused


def _is_single_token(launch: PlannedLaunch) -> bool:
    kernel = launch.kernel
    if not isinstance(kernel, AttentionKernel) or launch.steps or len(launch.plan.passes) != 1:
        return False
    words = dict(zip(kernel.words, launch.words.tolist(), strict=False))
    one = words["batch"] == words["q_len"] == 1 and kernel.group <= MOST_ROWS
    return one and not kernel.ragged and launch.plan.passes[0].variant.startswith("token")


@dataclass(frozen=True)
class _Shape:
    """What layers have in common."""

    parts: tuple[Part, ...]
    queries: tuple[int, int, int]
    shared: int


class _Heads:
    """A chain and an attention that may become one launch."""

    def __init__(
        self, chain: PlannedLaunch, attention: PlannedLaunch, program: Program, sizes: Mapping[str, int],
        target: CudaTarget,
    ) -> None:  # fmt: skip
        assert isinstance(chain.kernel, ChainKernel) and isinstance(attention.kernel, AttentionKernel)
        self.chain, self.attention, self.program, self.sizes, self.target = chain, attention, program, sizes, target
        self.kernel: ChainKernel = chain.kernel
        self.buffers = dict(chain.operands)
        self.own = {attention.kernel.words[word]: buffer for word, buffer in attention.operands}
        self.pieces = list(self.words_of_pieces())

    def words_of_pieces(self) -> Iterator[dict[str, int]]:
        """The index of each word of each piece."""
        at = 0
        for piece in self.kernel.pieces:
            names = (*piece.kernel.words, *EXTRA_WORDS, "share", *(f"bytes_{name}" for name in piece.fetched))
            yield {name: at + i for i, name in enumerate(names)}
            at += len(names)
        self.ends = at

    def buffer(self, i: int, param: str) -> str:
        return self.buffers[self.pieces[i][param]]

    def value(self, i: int, word: str) -> int:
        return int(self.chain.words[self.pieces[i][word]])

    def key(self) -> tuple[object, ...]:
        """Layers with the same key have the same shape: only names of buffers differ."""
        numbers: dict[str, int] = {}
        operands = (*self.buffers.values(), *self.own.values())
        places = [numbers.setdefault(buffer, len(numbers)) for buffer in operands]
        launches = {self.pieces[i]["launch"] for i in range(len(self.pieces))}
        words = [int(x) for i, x in enumerate(self.chain.words) if i not in launches]
        own = self.attention.words[: -len(EXTRA_WORDS)].tolist()
        private = [self.is_private(buffer) for buffer in numbers]
        return self.kernel.symbol, self.attention.kernel.symbol, *places, *words, *own, *private

    def is_private(self, buffer: str) -> bool:
        """Whether nothing else touches a buffer."""
        inside = {self.attention.number, *self.chain.covers}
        users = {n for n, launch in enumerate(self.program.launches) if any(v.buffer == buffer for v in launch.views())}
        return self.program.buffers[buffer].kind == ARENA and users <= inside

    def shape(self) -> _Shape | None:
        """How blocks run the pieces; none if they cannot."""
        attention = self.attention.kernel
        assert isinstance(attention, AttentionKernel)
        words = dict(zip(attention.words, self.attention.words.tolist(), strict=False))
        heads, group = words["kv_heads"], attention.group
        groups = np.diff(self.chain.words[self.ends :], prepend=0).tolist()
        tracks = [(n, t) for t, (track, n) in enumerate(zip(self.kernel.tracks, groups, strict=True)) for _ in track]
        pools = {self.own["k"], self.own["v"]}
        others = {buffer for name, buffer in self.own.items() if name not in ("q", "k", "v")}
        at, offsets = (
            0,
            dict[str, tuple[int, int, int]](),
        )  # of buffers in shared memory: offset, bytes per group, groups
        for i, (count, track) in enumerate(tracks):
            every = self.writes(track, tracks, self.own["q"])
            if count not in ((heads, heads * group) if every else (heads,)):
                return None
            for param in self.kernel.pieces[i].kernel.params:
                buffer = self.buffer(i, param.name)
                if not param.written or (buffer in pools and not every) or buffer in offsets:
                    continue
                size = evaluate(self.program.buffers[buffer].type.bytes, self.sizes) // count
                if buffer in others or not self.is_private(buffer):
                    return None
                offsets[buffer] = at, size, count // heads
                at += -(-size * (count // heads) // 16) * 16
        if self.own["q"] not in offsets or at > MOST_SHARED:
            return None
        if not self.queries_fit(words, offsets[self.own["q"]]):
            return None
        parts: list[Part] = []
        for i, (count, track) in enumerate(tracks):
            every = self.writes(track, tracks, self.own["q"])
            part = self.part(i, count, heads, every, offsets)
            if part is None:
                return None
            parts.append(part)
        (one,) = self.attention.plan.passes
        levels = _levels(self.kernel)
        placed = _placed([replace(p, level=level) for p, level in zip(parts, levels, strict=True)])
        shared = one.shared + at
        if shared > self.target.shared_bytes:
            return None
        return _Shape(tuple(placed), offsets[self.own["q"]], shared)

    def writes(self, track: int, tracks: Sequence[tuple[int, int]], buffer: str) -> bool:
        """Whether a track writes a buffer."""
        return any(
            p.written and self.buffer(i, p.name) == buffer
            for i, (_, t) in enumerate(tracks) if t == track for p in self.kernel.pieces[i].kernel.params
        )  # fmt: skip

    def queries_fit(self, words: Mapping[str, int], place: tuple[int, int, int]) -> bool:
        """Whether the queries of each group are where attention looks for them."""
        attention = self.attention.kernel
        assert isinstance(attention, AttentionKernel)
        _, size, groups = place
        element = attention.dtype.size
        per_group = attention.group // groups
        rows = np.arange(words["kv_heads"] * attention.group)
        low = words["q"] + rows * words["q_head"] * element
        group = rows // per_group
        return bool((low >= group * size).all() and (low + attention.head_dim * element <= (group + 1) * size).all())

    def part(
        self, i: int, count: int, heads: int, every: bool, offsets: Mapping[str, tuple[int, int, int]]
    ) -> Part | None:
        """How blocks run piece `i`, of `count` groups."""
        piece = self.kernel.pieces[i]
        variant = Variant.parse(piece.variant)
        share = self.value(i, "share")
        words = {name: self.value(i, name) for name in piece.kernel.words}
        if not variant.lanes or variant.lanes > THREADS:
            return None
        params = piece.kernel.params
        moved = {p.name: offsets[self.buffer(i, p.name)] for p in params if self.buffer(i, p.name) in offsets}
        for f in footprints(piece.kernel, words, count * share):
            param = params[f.param]
            if param.name not in moved:
                continue
            _, size, _ = moved[param.name]
            group = np.arange(count * share) // share
            low = f.low * param.dtype.size + words[param.name]
            high = f.high * param.dtype.size + words[param.name] + param.dtype.size
            if (low < group * size).any() or (high > (group + 1) * size).any():
                return None
        threads = variant.lanes if variant.lanes > WARP else -(-share * (count // heads) * variant.lanes // WARP) * WARP
        places = tuple((name, at, size) for name, (at, size, _) in moved.items())
        return Part(count // heads, every, 0, 0, min(threads, THREADS), places)

    def launch(self, shape: _Shape) -> PlannedLaunch:
        attention = self.attention.kernel
        assert isinstance(attention, AttentionKernel)
        kernel = HeadsKernel(self.kernel, shape.parts, attention, shape.queries, self.attention.sizes)
        moved = {self.pieces[i][name] for i, part in enumerate(shape.parts) for name, _, _ in part.moved}
        query = attention.words.index("q")
        operands = [(word, buffer) for word, buffer in self.chain.operands if word not in moved]
        operands += [(self.ends + word, buffer) for word, buffer in self.attention.operands if word != query]
        (one,) = self.attention.plan.passes
        return replace(
            self.attention, kernel=kernel, operands=tuple(operands), sizes=(),
            words=np.concatenate([self.chain.words[: self.ends], self.attention.words]),
            plan=replace(self.attention.plan, passes=(replace(one, shared=shape.shared),)),
            covers=(*self.chain.covers, self.attention.number),
        )  # fmt: skip


def _levels(chain: ChainKernel) -> list[int]:
    """Pieces of a track that wait are a level above those before them."""
    levels: list[int] = []
    for track in chain.tracks:
        level = 0
        for piece in track:
            level += piece.waits
            levels.append(level)
    return levels


def _placed(parts: Sequence[Part]) -> list[Part]:
    """The threads of each part: warps of their own while there are some."""
    result = list(parts)
    for level in {part.level for part in parts}:
        here = [i for i, part in enumerate(parts) if part.level == level]
        # Parts of several warps may have barriers of their own, of which there is one: they take turns.
        wide = [i for i in here if parts[i].threads > WARP]
        first = max((parts[i].threads for i in wide), default=0)
        for i in here:
            if i in wide:
                continue
            first = first if first + WARP <= THREADS else 0
            result[i] = replace(parts[i], first=first)
            first += WARP
    return result
