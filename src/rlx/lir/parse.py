"""Parses the unabridged text of LIR programs and kernels that `lir/text.py` prints.

The text is line-based; a more deeply indented line belongs to the one above it. A kernel name may end in a digest,
which must then match its contents. Errors are `ParseError`s that name the line.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import MISSING, fields, replace
from typing import Any

from rlx.dtypes import dtype
from rlx.errors import ParseError, nearest
from rlx.ir.source import STRING, Line, Source, Span, string
from rlx.ir.text import parse_array, parse_attr
from rlx.lir.kernels import (
    AttentionGradKernel,
    AttentionKernel,
    Epilogue,
    EpilogueOperand,
    Kernel,
    MatmulKernel,
    sum_name,
)
from rlx.lir.loops import LoopKernel
from rlx.lir.parse_loops import parse_lets, parse_loops
from rlx.lir.program import (
    ARENA,
    CONST,
    INPUT,
    OUTPUT,
    WEIGHT,
    Assertion,
    Branch,
    Buffer,
    Control,
    Launch,
    Loop,
    Program,
)
from rlx.lir.text import PLAIN_NAME
from rlx.lir.views import View
from rlx.types import Size, contiguous_strides, parse_dim, parse_type

_NAME = rf"(?:{STRING}|{PLAIN_NAME})"
_PROGRAM = re.compile(rf"program @({_NAME})\(([^)]*)\) for ({_NAME})")
_LIMIT = re.compile(r"limit (\w+) <= (\d{1,18})")
_BUFFER = re.compile(
    rf"({INPUT}|{OUTPUT}|{WEIGHT}|{CONST}|{ARENA}) ({_NAME}): (\w+\[[^]]*\])(?: as ({STRING}))?(?: = (.*))?"
)
_BATCH = re.compile(r"entries of (\w+) are independent")
_ASSERTION = re.compile(rf"assert (.+?) (==|<=) (.+?)(?: steps (\(.*?\)))?( launched)? op ({STRING}) where ({STRING})")
_LAUNCH = re.compile(r"launch (\S+)(?: split (\w+) units (.+?))?( barrier)?")
_ORIGIN = re.compile(r"node (-?\d+) also (\(.*?\)) flops (.+)")
_VIEW = re.compile(rf"view ({_NAME}): (\w+)\[([^]]*)\](?: strides (\(.*?\)))?(?: at (.+))?")
_LOOP = re.compile(r"(loop|while) (\w+)(?: in (.+))?, (\w+):(  barrier between)?(  barrier)?")
_BRANCH = re.compile(r"if (view .+):(  barrier)?")
_KERNEL = re.compile(r"kernel ([\w-]+)(?:\.([0-9a-f]{8}))?(\(.*)?")
_OPERAND = re.compile(r"operand (\w+): (\w+)( per row)?( written)?")
_FIELD = re.compile(rf"(\w+) ({STRING}|[\w.]+\([^)]*\)|[^,]+)(?:, |$)")


def parse_program(text: str) -> Program:
    """Parse the output of `Program.text(full=True)`."""
    source = Source(text, "LIR text")
    head, *kernels = source.lines() or [Line(source, 0, 0)]
    if re.fullmatch(r"program @.*\)\s*", head.text):
        head.fail("this is the short text of a program", hint="print it with text(full=True), which parses back")
    known: dict[str, Kernel] = {}
    for line in kernels:
        name, kernel = _kernel(line)
        if known.setdefault(name, kernel) is not kernel:
            line.fail(f"kernel {name} is declared twice")
        known[kernel.symbol] = kernel
    with head.located():
        return _ProgramParser(head, known).parse()


def parse_kernel(text: str) -> Kernel:
    """Parse the output of `lir.text.kernel_text`."""
    lines = Source(text, "LIR text").lines()
    if len(lines) != 1:
        raise ParseError(f"LIR text: expected one kernel, found {len(lines)}")
    return _kernel(lines[0])[1]


def _unquoted(name: str) -> str:
    return string(name) if name.startswith('"') else name


def _attr(line: Line, span: Span) -> Any:
    """Parse an attribute from part of a line."""
    return parse_attr(line.source.part(*span))


# -- kernels -----------------------------------------------------------------------------------------------------------
def _kernel(line: Line) -> tuple[str, Kernel]:
    """A kernel, and the name by which launches refer to it."""
    with line.located():
        name, digest, loops = line.match(_KERNEL, "a kernel such as 'kernel copy(x0: f32) -> y1: f32'").groups()
        kernel = parse_loops(name, loops, _nested(line.inside)) if loops else _record(line)
    if digest and kernel.symbol != f"{name}.{digest}":
        line.fail(f"the contents of this kernel give {kernel.symbol}", hint="leave the digest out to change the kernel")
    return (f"{name}.{digest}" if digest else name), kernel


def _nested(lines: Sequence[Line], depth: int = 0) -> Iterator[tuple[int, Line]]:
    """All lines in order, with their depth."""
    for line in lines:
        yield depth, line
        yield from _nested(line.inside, depth + 1)


def _record(line: Line) -> Kernel:
    head, *rest = line.inside or [line]
    kind = head.text.partition(" ")[0]
    field_text = head.part((min(head.start + len(kind) + 1, head.stop), head.stop))
    match kind:
        case "attention":
            return AttentionKernel(**_fields(field_text, AttentionKernel))
        case "attention_grad":
            return AttentionGradKernel(AttentionKernel(**_fields(field_text, AttentionKernel)))
        case "matmul":
            return _matmul(head, field_text, rest)
        case _:
            head.fail(f"{kind!r} is not a kind of kernel", hint="attention, attention_grad, matmul, or loops")


def _fields(line: Line, record: type[Any], *other: str) -> dict[str, Any]:
    """The fields of a record by name, except those in `other`, which have lines of their own; some have defaults."""
    known = {f.name: f.default for f in fields(record) if f.name not in other}
    values: dict[str, Any] = {}
    end = line.start
    while part := _FIELD.match(line.source.text, end, line.stop):
        if part[1] not in known or part[1] in values:
            line.fail(f"{part[1]!r} is unknown or given twice", hint=nearest(part[1], known))
        values[part[1]] = _attr(line, part.span(2))
        end = part.end()
    if end != line.stop:
        line.fail(f"{line.source.text[end : min(end + 40, line.stop)]!r} is not a field and its value")
    if missing := [name for name, default in known.items() if default is MISSING and name not in values]:
        line.fail(f"fields are missing: {', '.join(missing)}")
    return values


def _matmul(head: Line, field_text: Line, rest: Sequence[Line]) -> MatmulKernel:
    values = _fields(field_text, MatmulKernel, "epilogue", "epilogue_operands")
    operands: list[EpilogueOperand] = []
    bodies: list[Line] = []
    for line in rest:
        word = line.text.partition(" ")[0]
        if word == "operand":
            name, kind, per_row, written = line.match(_OPERAND, "an operand of an epilogue").groups()
            operands.append(EpilogueOperand(name, dtype(kind), per_row is None, written is not None))
        elif word == "epilogue":
            bodies.append(line)
        else:
            line.fail(f"{word!r} is not part of a matmul", hint=nearest(word, ("operand", "epilogue")))
    if len(bodies) > 1:
        head.fail("a matmul has at most one epilogue")
    kernel = MatmulKernel(**values, epilogue=None, epilogue_operands=tuple(operands))
    return replace(kernel, epilogue=_epilogue(bodies[0], kernel)) if bodies else kernel


def _epilogue(line: Line, kernel: MatmulKernel) -> Epilogue:
    """Lets, then one value per written operand."""
    known = {sum_name(i): kernel.accumulator for i in range(kernel.weights)}
    known |= {operand.name: operand.dtype for operand in kernel.epilogue_operands if not operand.written}
    written = [operand.name for operand in kernel.epilogue_operands if operand.written]
    lets = parse_lets(_nested(line.inside), known)
    stored = lets[len(lets) - len(written) :]
    if [let.name for let in stored] != written:
        line.fail(f"an epilogue ends with the values of {', '.join(written)}")
    name = line.text.removeprefix("epilogue").strip()
    return Epilogue(name, tuple(lets[: len(lets) - len(written)]), tuple(let.value for let in stored))


# -- programs ----------------------------------------------------------------------------------------------------------
class _ProgramParser:
    def __init__(self, head: Line, kernels: dict[str, Kernel]) -> None:
        self.head, self.kernels = head, kernels
        name, symbols, target = head.match(_PROGRAM, "a program such as 'program @name(n) for avx512'").groups()
        self.program = Program(_unquoted(name), _unquoted(target), tuple(re.findall(r"\w+", symbols)), {})

    def parse(self) -> Program:
        lines = self.head.inside
        count = 0
        while count < len(lines) and self.declaration(lines[count]):
            count += 1
        self.section(lines[count:])
        return self.program

    def declaration(self, line: Line) -> bool:
        """Parse a declaration into the program; False if the line is not one."""
        readers = {"limit": self.limit, "entries": self.batch, "assert": self.assertion}
        readers |= dict.fromkeys((INPUT, OUTPUT, WEIGHT, CONST, ARENA), self.buffer)
        read = readers.get(line.text.partition(" ")[0])
        if read is not None:
            with line.located():
                read(line)
        return read is not None

    def limit(self, line: Line) -> None:
        symbol, limit = line.match(_LIMIT, "a limit").groups()
        self.program.limits[symbol] = int(limit)

    def batch(self, line: Line) -> None:
        (self.program.batch,) = line.match(_BATCH, "the independent axis").groups()

    def assertion(self, line: Line) -> None:
        match = line.match(_ASSERTION, "an assertion")
        a, relation, b, steps, launched, op, where = match.groups()
        sizes = _attr(line, match.span(4)) if steps else ()
        self.program.assertions.append(
            Assertion(parse_dim(a), parse_dim(b), relation, string(op), string(where), sizes, launched is not None)
        )

    def buffer(self, line: Line) -> None:
        kind, quoted, type_text, note, value = line.match(_BUFFER, "a buffer").groups()
        name, type_ = _unquoted(quoted), parse_type(type_text)
        if name in self.program.buffers:
            line.fail(f"buffer {name!r} is declared twice")
        data = None if value is None else parse_array(value, type_)
        self.program.buffers[name] = Buffer(name, type_, kind, data, string(note) if note else "")
        lists = {INPUT: self.program.inputs, WEIGHT: self.program.weights, OUTPUT: self.program.outputs}
        if kind in lists:
            lists[kind].append(name)

    def section(self, lines: Sequence[Line]) -> None:
        """Launches, loops and branches in order."""
        at = 0
        while at < len(lines):
            line = lines[at]
            then = lines[at + 1] if at + 1 < len(lines) and lines[at + 1].text in ("then:", "else:") else None
            with line.located():
                if line.text.startswith("launch "):
                    self.program.launches.append(self.launch(line))
                elif line.text.startswith(("loop ", "while ")):
                    self.loop(line, then)
                elif line.text.startswith("if "):
                    self.branch(line, then)
                else:
                    line.fail("this is not a launch, loop or branch")
            at += 1 if then is None else 2

    @property
    def here(self) -> int:
        return len(self.program.launches)

    def loop(self, line: Line, then: Line | None) -> None:
        kind, symbol, length, parity, between, barrier = line.match(_LOOP, "a loop").groups()
        loop = Loop(
            self.here, self.here, self.here, None if length is None else parse_dim(length), symbol, parity,
            between=between is not None, barrier=barrier is not None,
        )  # fmt: skip
        number = self.reserve(loop)
        tests = [i for i, inner in enumerate(line.inside) if inner.text.startswith("test ")]
        if len(tests) != (kind == "while"):
            line.fail(f"a {kind} has {len(tests)} tests")
        if tests:
            self.section(line.inside[: tests[0]])
            test = line.inside[tests[0]]
            predicate = self.view(test.part((test.start + len("test "), test.stop)))
            loop = replace(loop, predicate=predicate, test=self.here)
            self.section(line.inside[tests[0] + 1 :])
        else:
            self.section(line.inside)
        loop = replace(loop, last=self.here)
        self.section(then.inside if then else ())
        self.program.controls[number] = replace(loop, end=self.here)

    def branch(self, line: Line, other: Line | None) -> None:
        head = line.match(_BRANCH, "a branch")
        predicate = self.view(line.part(head.span(1)))
        branch = Branch(self.here, self.here, self.here, predicate, barrier=head[2] is not None)
        number = self.reserve(branch)
        self.section(line.inside)
        branch = replace(branch, middle=self.here)
        self.section(other.inside if other else ())
        self.program.controls[number] = replace(branch, end=self.here)

    def reserve(self, control: Control) -> int:
        """Reserve the index of a loop or branch, so that it precedes those inside it."""
        self.program.controls.append(control)
        return len(self.program.controls) - 1

    def launch(self, line: Line) -> Launch:
        name, split, units, barrier = line.match(_LAUNCH, "a launch").groups()
        if name not in self.kernels:
            line.fail(f"no kernel is called {name}", hint=nearest(name, self.kernels))
        kernel = self.kernels[name]
        words: dict[str, View | Size] = {}
        shares: dict[str, Size] = {}
        origin: dict[str, Any] = {}
        for inner in line.inside:
            with inner.located():
                key, _, rest = inner.text.partition(" ")
                if rest.startswith("= view "):
                    words[key] = self.view(inner.part((inner.start + len(key) + len(" = "), inner.stop)))
                elif rest.startswith("= "):
                    words[key] = parse_dim(rest.removeprefix("= "))
                elif key == "share":
                    word, _, size = rest.partition(" = ")
                    shares[word] = parse_dim(size)
                elif key == "where":
                    origin["where"] = string(rest)
                else:
                    match = inner.match(_ORIGIN, "a word, a share or an origin of a launch")
                    origin |= {"node": int(match[1]), "also": _attr(inner, match.span(2)), "flops": parse_dim(match[3])}
        unknown = next((w for w in (*words, *shares) if w not in kernel.words), None)
        if unknown is not None:
            line.fail(f"{name} has no word {unknown!r}", hint=nearest(unknown, kernel.words))
        if (units is not None) != isinstance(kernel, LoopKernel):
            line.fail(f"{name} is {kernel.kind}: only loop kernels have units, and they must")
        values = tuple(words.get(w) for w in kernel.words)
        count = None if units is None else parse_dim(units)
        return Launch(kernel, values, count, split or "", barrier is not None, shares=shares, **origin)

    def view(self, line: Line) -> View:
        with line.located():
            match = line.match(_VIEW, "a view")
            buffer, kind, shape, strides, offset = match.groups()
            name, type_ = _unquoted(buffer), parse_type(f"{kind}[{shape}]")
            if name not in self.program.buffers:
                line.fail(f"no buffer is called {name!r}", hint=nearest(name, self.program.buffers))
            steps = contiguous_strides(type_.shape) if strides is None else _attr(line, match.span(4))
            return View(name, type_.dtype, type_.shape, steps, parse_dim(offset) if offset else 0)
