"""Parses the unabridged text of LIR programs and kernels that `lir/text.py` prints.

Text is lines; a line that is indented further belongs to the one above it. A kernel's name may end in its digest, which
must then fit what it contains. Errors are `ParseError`s that tell the line.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

from rlx.dtypes import dtype
from rlx.errors import ParseError, RlxError, nearest, shortened
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

Parsed = TypeVar("Parsed")
_STRING = r'"(?:[^"\\]|\\.)*"'
_NAME = rf"(?:{_STRING}|{PLAIN_NAME})"
_PROGRAM = re.compile(rf"program @({_NAME})\(([^)]*)\) for ({_NAME})")
_LIMIT = re.compile(r"limit (\w+) <= (\d{1,18})")
_BUFFER = re.compile(
    rf"({INPUT}|{OUTPUT}|{WEIGHT}|{CONST}|{ARENA}) ({_NAME}): (\w+\[[^]]*\])(?: as ({_STRING}))?(?: = (.*))?"
)
_BATCH = re.compile(r"entries of (\w+) are independent")
_ASSERTION = re.compile(
    rf"assert (.+?) (==|<=) (.+?)(?: steps (\(.*?\)))?( launched)? op ({_STRING}) where ({_STRING})"
)
_LAUNCH = re.compile(r"launch (\S+)(?: split (\w+) units (.+?))?( barrier)?")
_ORIGIN = re.compile(r"node (-?\d+) also (\(.*?\)) flops (.+)")
_VIEW = re.compile(rf"view ({_NAME}): (\w+)\[([^]]*)\](?: strides (\(.*?\)))?(?: at (.+))?")
_LOOP = re.compile(r"(loop|while) (\w+)(?: in (.+))?, (\w+):(  barrier between)?(  barrier)?")
_BRANCH = re.compile(r"if (view .+):(  barrier)?")
_KERNEL = re.compile(r"kernel ([\w-]+)(?:\.([0-9a-f]{8}))?(\(.*)?")
_OPERAND = re.compile(r"operand (\w+): (\w+)( per row)?( written)?")
_FIELD = re.compile(rf"(\w+) ({_STRING}|[\w.]+\([^)]*\)|[^,]+)(?:, |$)")


@dataclass
class Line:
    """A line of text and those that belong to it."""

    number: int
    text: str
    inside: list[Line] = field(default_factory=list)


def parse_program(text: str) -> Program:
    """The program that `Program.text(full=True)` has printed."""
    head, *kernels = _lines(text) or [Line(1, "")]
    known: dict[str, Kernel] = {}
    for line in kernels:
        name, kernel = _at(line, _kernel, line)
        if known.setdefault(name, kernel) is not kernel:
            raise _error(line, f"kernel {name} is there twice")
        known[kernel.symbol] = kernel
    return _at(head, _ProgramParser(head, known).parse)


def parse_kernel(text: str) -> Kernel:
    """The kernel that `lir.text.kernel_text` has printed."""
    lines = _lines(text)
    if len(lines) != 1:
        raise ParseError(f"LIR text: expected one kernel, found {len(lines)}")
    return _at(lines[0], _kernel, lines[0])[1]


def _lines(text: str) -> list[Line]:
    """The lines that are not indented, with all others inside them."""
    top: list[Line] = []
    opened: list[tuple[int, list[Line]]] = [(0, top)]
    for number, whole in enumerate(text.splitlines(), 1):
        line = Line(number, whole.strip())
        if not line.text:
            continue
        depth = len(whole) - len(whole.lstrip())
        while depth < opened[-1][0]:
            opened.pop()
        if depth > opened[-1][0]:
            if not opened[-1][1]:
                raise _error(line, "is indented below nothing")
            opened.append((depth, opened[-1][1][-1].inside))
        opened[-1][1].append(line)
    return top


def _error(line: Line, problem: str, hint: str | None = None) -> ParseError:
    return ParseError(
        f"LIR text: line {line.number}: {shortened(problem, 300)}", notes=[f"in: {line.text[:100]}"], hint=hint
    )


def _at(line: Line, parse: Callable[..., Parsed], *given: Any) -> Parsed:
    """What `parse` makes of a line; errors tell its number, unless they tell one already."""
    try:
        return parse(*given)
    except RlxError as error:
        if str(error).startswith("LIR text: line"):
            raise
        raise _error(line, str(error), error.hint) from error


def _match(pattern: re.Pattern[str], line: Line, what: str) -> tuple[Any, ...]:
    found = pattern.fullmatch(line.text)
    if found is None:
        raise _error(line, f"this is not {what}")
    return found.groups()


def _string(text: str) -> str:
    """What is in quotes."""
    found = parse_attr(text)
    if not isinstance(found, str):
        raise ParseError(f"{text[:40]!r} is not a string")
    return found


def _unquoted(name: str) -> str:
    return _string(name) if name.startswith('"') else name


# -- kernels -----------------------------------------------------------------------------------------------------------
def _kernel(line: Line) -> tuple[str, Kernel]:
    """A kernel and the name by which launches call it."""
    name, digest, loops = _match(_KERNEL, line, "a kernel such as 'kernel copy(x0: f32) -> y1: f32'")
    kernel = parse_loops(name, loops, _nested(line.inside)) if loops else _record(line)
    if digest and kernel.symbol != f"{name}.{digest}":
        raise _error(line, f"the kernel is {kernel.symbol} by its contents", hint="leave the digest out to change it")
    return (f"{name}.{digest}" if digest else name), kernel


def _nested(lines: Sequence[Line], depth: int = 0) -> Iterator[tuple[int, int, str]]:
    """Lines one by one: number, depth and text."""
    for line in lines:
        yield line.number, depth, line.text
        yield from _nested(line.inside, depth + 1)


def _record(line: Line) -> Kernel:
    head, *rest = line.inside or [line]
    kind, _, given = head.text.partition(" ")
    match kind:
        case "attention":
            return AttentionKernel(**_fields(head, given, AttentionKernel))
        case "attention_grad":
            return AttentionGradKernel(AttentionKernel(**_fields(head, given, AttentionKernel)))
        case "matmul":
            return _matmul(head, given, rest)
        case _:
            raise _error(head, f"{kind!r} is no kind of kernel", hint="attention, attention_grad, matmul, or loops")


def _fields(line: Line, text: str, record: type[Any], *other: str) -> dict[str, Any]:
    """The fields of a record by name, all but those that have lines of their own."""
    known = {f.name for f in fields(record)} - set(other)
    found: dict[str, Any] = {}
    end = 0
    while part := _FIELD.match(text, end):
        if part[1] not in known or part[1] in found:
            raise _error(line, f"{part[1]!r} is not a field that is missing", hint=nearest(part[1], known))
        found[part[1]] = parse_attr(part[2])
        end = part.end()
    if end != len(text):
        raise _error(line, f"{text[end : end + 40]!r} is not a field and its value")
    if missing := known - found.keys():
        raise _error(line, f"fields are missing: {', '.join(sorted(missing))}")
    return found


def _matmul(head: Line, given: str, rest: Sequence[Line]) -> MatmulKernel:
    values = _fields(head, given, MatmulKernel, "epilogue", "beside")
    beside: list[EpilogueOperand] = []
    bodies: list[Line] = []
    for line in rest:
        word = line.text.partition(" ")[0]
        if word == "operand":
            name, kind, per_row, written = _match(_OPERAND, line, "an operand of an epilogue")
            beside.append(EpilogueOperand(name, dtype(kind), per_row is None, written is not None))
        elif word == "epilogue":
            bodies.append(line)
        else:
            raise _error(line, f"{word!r} is no part of a matmul", hint=nearest(word, ("operand", "epilogue")))
    if len(bodies) > 1:
        raise _error(head, "a matmul has at most one epilogue")
    kernel = MatmulKernel(**values, epilogue=None, beside=tuple(beside))
    return replace(kernel, epilogue=_epilogue(bodies[0], kernel)) if bodies else kernel


def _epilogue(line: Line, kernel: MatmulKernel) -> Epilogue:
    """Lets, then the value of each operand that is written."""
    known = {sum_name(i): kernel.accumulator for i in range(kernel.weights)}
    known |= {operand.name: operand.dtype for operand in kernel.beside if not operand.written}
    written = [operand.name for operand in kernel.beside if operand.written]
    lets = parse_lets(_nested(line.inside), known)
    stored = lets[len(lets) - len(written) :]
    if [let.name for let in stored] != written:
        raise _error(line, f"an epilogue ends with the values of {', '.join(written)}")
    name = line.text.removeprefix("epilogue").strip()
    return Epilogue(name, tuple(lets[: len(lets) - len(written)]), tuple(let.value for let in stored))


# -- programs ----------------------------------------------------------------------------------------------------------
class _ProgramParser:
    def __init__(self, head: Line, kernels: dict[str, Kernel]) -> None:
        self.head, self.kernels = head, kernels
        name, symbols, target = _match(_PROGRAM, head, "a program such as 'program @name(n) for avx512'")
        self.program = Program(_unquoted(name), _unquoted(target), tuple(re.findall(r"\w+", symbols)), {})

    def parse(self) -> Program:
        lines = self.head.inside
        count = 0
        while count < len(lines) and _at(lines[count], self.declaration, lines[count]):
            count += 1
        self.section(lines[count:])
        return self.program

    def declaration(self, line: Line) -> bool:
        """Whether a line is one of those in front of the launches, which is then in the program."""
        program = self.program
        match line.text.partition(" ")[0]:
            case "limit":
                symbol, most = _match(_LIMIT, line, "a limit")
                program.limits[symbol] = int(most)
            case "entries":
                (program.batch,) = _match(_BATCH, line, "the independent axis")
            case "assert":
                a, relation, b, steps, launched, op, where = _match(_ASSERTION, line, "an assertion")
                sizes = parse_attr(steps) if steps else ()
                assertion = Assertion(
                    parse_dim(a), parse_dim(b), relation, _string(op), _string(where), sizes, launched is not None
                )
                program.assertions.append(assertion)
            case kind if kind in (INPUT, OUTPUT, WEIGHT, CONST, ARENA):
                self.buffer(line)
            case _:
                return False
        return True

    def buffer(self, line: Line) -> None:
        kind, quoted, type_text, note, value = _match(_BUFFER, line, "a buffer")
        name, type_ = _unquoted(quoted), parse_type(type_text)
        if name in self.program.buffers:
            raise _error(line, f"buffer {name!r} is there twice")
        data = None if value is None else parse_array(value, type_)
        self.program.buffers[name] = Buffer(name, type_, kind, data, _string(note) if note else "")
        lists = {INPUT: self.program.inputs, WEIGHT: self.program.weights, OUTPUT: self.program.outputs}
        if kind in lists:
            lists[kind].append(name)

    def section(self, lines: Sequence[Line]) -> None:
        """Launches, loops and branches in order."""
        at = 0
        while at < len(lines):
            line = lines[at]
            then = lines[at + 1] if at + 1 < len(lines) and lines[at + 1].text in ("then:", "else:") else None
            if line.text.startswith("launch "):
                self.program.launches.append(_at(line, self.launch, line))
            elif line.text.startswith(("loop ", "while ")):
                _at(line, self.loop, line, then)
            elif line.text.startswith("if "):
                _at(line, self.branch, line, then)
            else:
                raise _error(line, "this is neither a launch nor a loop or branch")
            at += 1 if then is None else 2

    @property
    def here(self) -> int:
        return len(self.program.launches)

    def loop(self, line: Line, then: Line | None) -> None:
        kind, symbol, length, parity, between, barrier = _match(_LOOP, line, "a loop")
        found = Loop(
            self.here, self.here, self.here, None if length is None else parse_dim(length), symbol, parity,
            between=between is not None, barrier=barrier is not None,
        )  # fmt: skip
        number = self.reserve(found)
        tests = [i for i, inner in enumerate(line.inside) if inner.text.startswith("test ")]
        if len(tests) != (kind == "while"):
            raise _error(line, f"a {kind} has {len(tests)} tests")
        if tests:
            self.section(line.inside[: tests[0]])
            predicate = self.view(line.inside[tests[0]], line.inside[tests[0]].text.removeprefix("test "))
            found = replace(found, predicate=predicate, test=self.here)
            self.section(line.inside[tests[0] + 1 :])
        else:
            self.section(line.inside)
        found = replace(found, last=self.here)
        self.section(then.inside if then else ())
        self.program.controls[number] = replace(found, end=self.here)

    def branch(self, line: Line, other: Line | None) -> None:
        predicate, barrier = _match(_BRANCH, line, "a branch")
        found = Branch(self.here, self.here, self.here, self.view(line, predicate), barrier is not None)
        number = self.reserve(found)
        self.section(line.inside)
        found = replace(found, middle=self.here)
        self.section(other.inside if other else ())
        self.program.controls[number] = replace(found, end=self.here)

    def reserve(self, control: Control) -> int:
        """A place for a loop or branch before those inside it."""
        self.program.controls.append(control)
        return len(self.program.controls) - 1

    def launch(self, line: Line) -> Launch:
        name, split, units, barrier = _match(_LAUNCH, line, "a launch")
        if name not in self.kernels:
            raise _error(line, f"no kernel is called {name}", hint=nearest(name, self.kernels))
        kernel = self.kernels[name]
        words: dict[str, View | Size] = {}
        shares: dict[str, Size] = {}
        origin: dict[str, Any] = {}
        for inner in line.inside:
            key, _, rest = inner.text.partition(" ")
            if rest.startswith("= "):
                value = rest.removeprefix("= ")
                words[key] = self.view(inner, value) if value.startswith("view ") else _at(inner, parse_dim, value)
            elif key == "share":
                word, _, size = rest.partition(" = ")
                shares[word] = _at(inner, parse_dim, size)
            elif key == "where":
                origin["where"] = _string(rest)
            else:
                node, also, flops = _match(_ORIGIN, inner, "a word, a share or an origin of a launch")
                origin |= {"node": int(node), "also": parse_attr(also), "flops": parse_dim(flops)}
        unknown = next((w for w in (*words, *shares) if w not in kernel.words), None)
        if unknown is not None:
            raise _error(line, f"{name} has no word {unknown!r}", hint=nearest(unknown, kernel.words))
        if (units is not None) != isinstance(kernel, LoopKernel):
            raise _error(line, f"{name} is {kernel.kind}: loops have units, and no other kernel does")
        values = tuple(words.get(w) for w in kernel.words)
        count = None if units is None else parse_dim(units)
        return Launch(kernel, values, count, split or "", barrier is not None, shares=shares, **origin)

    def view(self, line: Line, text: str) -> View:
        buffer, kind, shape, strides, offset = _match(_VIEW, replace(line, text=text), "a view")
        name, type_ = _unquoted(buffer), _at(line, parse_type, f"{kind}[{shape}]")
        if name not in self.program.buffers:
            raise _error(line, f"no buffer is called {name!r}", hint=nearest(name, self.program.buffers))
        steps = contiguous_strides(type_.shape) if strides is None else parse_attr(strides)
        return View(name, type_.dtype, type_.shape, steps, parse_dim(offset) if offset else 0)
