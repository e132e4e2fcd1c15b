"""The code of repeats: emits `repeat(self, inputs)`, a function of CPython, as LLVM IR."""

from __future__ import annotations

from rlx.backends.cpu.builder import NULL, Builder, Value, const, i64
from rlx.backends.cpu.driver import SCRATCH, SLOTS, STATUS, STRIDE
from rlx.backends.cpu.fast_call import (
    API,
    AXES,
    DATA,
    DTYPE,
    ELEMENT,
    FLAGS,
    GIVEN,
    GIVES,
    HELD,
    JOB,
    KEEPS,
    KEPT,
    LEAF_WORDS,
    MASK,
    MOVED,
    MOVED_WORDS,
    MOVES,
    NAME,
    RANK,
    REFERENCES,
    SHAPE,
    SIZES,
    TABLE,
    TAKEN,
    TAKES,
    TYPE,
    WEAK,
    WORDS,
)

NO, YES = const("i1", False), const("i1", True)


def repeat(b: Builder, self: Value, inputs: Value) -> Value:
    """`self` is the array that has the block."""
    return _Repeat(b, b.load("ptr", b.offset(self, DATA), align=8), inputs).emit()


class _Repeat:
    """Inputs and outputs are held, with a reference to each, from when they are found until the end."""

    def __init__(self, b: Builder, block: Value, inputs: Value) -> None:
        self.b, self.block, self.inputs = b, block, inputs
        self.table, self.held = self.word(block, TABLE, "ptr"), self.word(block, HELD, "ptr")
        self.takes, self.gives = self.word(block, TAKES), self.word(block, GIVES)
        self.job = self.word(self.word(block, JOB, "ptr"), 0, "ptr")

    def word(self, pointer: Value, offset: int, type_: str = "i64") -> Value:
        return self.b.load(type_, self.b.offset(pointer, offset), align=4 if type_ == "i32" else 8)

    def place(self, table: Value, index: Value, words: int = 1) -> Value:
        return self.b.offset(table, self.b.mul(index, words), "i64")

    def known(self, name: str) -> Value:
        """A function or object of CPython."""
        return self.word(self.table, API[name], "ptr")

    def call(self, result: str, name: str, *arguments: Value) -> Value:
        return self.b.assign(result, f"call {result} {self.known(name).text}({', '.join(map(str, arguments))})")

    def change(self, name: str, *arguments: Value) -> None:
        self.b.call_pointer(self.known(name), *arguments)

    def equal(self, a: Value, b: Value | int) -> Value:
        return self.b.icmp("eq", a, b)

    def exists(self, a: Value) -> Value:
        return self.b.icmp("ne", a, NULL)

    def both(self, a: Value, b: Value) -> Value:
        return self.b.op("and", a, b)

    def emit(self) -> Value:
        b = self.b
        everything = b.add(self.takes, self.gives)
        b.loop(0, everything, 1, lambda i: b.store(NULL, self.place(self.held, i), align=8))
        fits = self.both(self.exists(self.job), self.equal(self.word(self.inputs, TYPE, "ptr"), self.known("dict")))
        (fits,) = b.when(fits, lambda: [self.equal(self.call("i64", "PyDict_Size", self.inputs), self.takes)],
                         lambda: [NO])  # fmt: skip
        (fits,) = b.loop(0, self.takes, 1, self.take, [fits])
        (outputs,) = b.when(fits, self.make_outputs, lambda: [NULL])
        (result,) = b.when(self.exists(outputs), lambda: self.run(outputs), self.refuse)
        # Of nothing, too, a reference may be given back.
        b.loop(0, everything, 1, lambda i: self.change("Py_DecRef", self.word(self.place(self.held, i), 0, "ptr")))
        return result

    def refuse(self) -> list[Value]:
        """None. What has gone wrong will do so again, where Python can say what it is."""
        self.change("PyErr_Clear")
        self.change("Py_IncRef", self.known("none"))
        return [self.known("none")]

    # -- inputs -------------------------------------------------------------------------------------------------------
    def take(self, i: Value, fits: Value) -> list[Value]:
        b = self.b
        leaf = self.place(self.word(self.block, TAKEN, "ptr"), i, LEAF_WORDS)

        def look_up() -> list[Value]:
            array = self.call("ptr", "PyDict_GetItemWithError", self.inputs, self.word(leaf, NAME, "ptr"))
            self.change("Py_IncRef", array)
            b.store(array, self.place(self.held, i), align=8)
            return b.when(self.exists(array), lambda: self.compare(leaf, array), lambda: [NO])

        return b.when(fits, look_up, lambda: [NO])

    def compare(self, leaf: Value, array: Value) -> list[Value]:
        """Whether it is an array of the element type and shape that a leaf names. No subclass is one."""
        b = self.b

        def of_elements() -> list[Value]:
            mask = b.convert("trunc", self.word(leaf, MASK), "i32")
            good = self.equal(b.op("and", self.word(array, FLAGS, "i32"), mask), mask)
            good = self.both(good, self.equal(self.word(array, ELEMENT, "ptr"), self.word(leaf, DTYPE, "ptr")))
            rank = b.convert("sext", self.word(array, RANK, "i32"), "i64")
            good = self.both(good, self.equal(rank, self.word(leaf, AXES)))
            return b.when(good, lambda: of_shape(rank), lambda: [NO])

        def of_shape(rank: Value) -> list[Value]:
            sizes, wanted = self.word(array, SIZES, "ptr"), self.word(leaf, SHAPE, "ptr")

            def axis(k: Value, same: Value) -> list[Value]:
                have, want = (self.word(self.place(table, k), 0) for table in (sizes, wanted))
                return [self.both(same, self.equal(have, want))]

            return b.loop(0, rank, 1, axis, [YES])

        is_array = self.equal(self.word(array, TYPE, "ptr"), self.known("array"))
        return b.when(is_array, of_elements, lambda: [NO])

    # -- outputs ------------------------------------------------------------------------------------------------------
    def make_outputs(self) -> list[Value]:
        """A list of arrays; nothing where there is no memory."""
        b = self.b
        outputs = self.call("ptr", "PyList_New", self.gives)

        def dropped() -> list[Value]:
            self.change("Py_DecRef", outputs)
            return [NULL]

        (whole,) = b.loop(0, self.gives, 1, lambda i, whole: self.make(outputs, i, whole), [self.exists(outputs)])
        return b.when(whole, lambda: [outputs], dropped)

    def make(self, outputs: Value, i: Value, whole: Value) -> list[Value]:
        b = self.b
        kept, leaf = self.word(self.block, KEPT, "ptr"), self.place(self.word(self.block, GIVEN, "ptr"), i, LEAF_WORDS)

        def again(array: Value) -> list[Value]:
            self.change("Py_IncRef", array)
            return [array]

        def anew() -> list[Value]:
            array = self.call("ptr", "PyObject_CallObject", self.known("empty"), self.word(leaf, NAME, "ptr"))

            def keep() -> None:
                self.change("Py_IncRef", array)
                self.call("i32", "PyList_SetItem", kept, i, array)

            b.when(self.both(self.exists(array), b.icmp("ne", self.word(self.block, KEEPS), 0)), keep)
            return [array]

        def one() -> list[Value]:
            before = self.call("ptr", "PyList_GetItem", kept, i)
            # Nobody else holds it, and nobody has changed more than its elements: it is as good as a new one, unless
            # a weak reference would see it come back.
            free = self.equal(self.word(before, REFERENCES, "i32"), 1)
            (free,) = b.when(free, lambda: self.compare(leaf, before), lambda: [NO])
            (free,) = b.when(free, lambda: [self.equal(self.word(before, WEAK, "ptr"), NULL)], lambda: [NO])
            (array,) = b.when(free, lambda: again(before), anew)
            b.store(array, self.place(self.held, b.add(self.takes, i)), align=8)
            self.change("Py_IncRef", array)
            self.call("i32", "PyList_SetItem", outputs, i, array)  # which takes the reference
            return [self.exists(array)]

        return b.when(whole, one, lambda: [NO])

    # -- the run ------------------------------------------------------------------------------------------------------
    def run(self, outputs: Value) -> list[Value]:
        """The outputs; False where a thread has found a fault."""
        b = self.b
        words, moved = self.word(self.block, WORDS, "ptr"), self.word(self.block, MOVED, "ptr")

        def move(i: Value) -> None:
            entry = self.place(moved, i, MOVED_WORDS)
            array = self.word(self.place(self.held, self.word(entry, 8)), 0, "ptr")
            b.store(
                b.add(self.word(array, DATA), self.word(entry, 16)), self.place(words, self.word(entry, 0)), align=8
            )

        b.loop(0, self.word(self.block, MOVES), 1, move)
        thread = self.call("ptr", "PyEval_SaveThread")
        b.call("i64", "call", self.job, self.block)
        self.change("PyEval_RestoreThread", thread)
        scratch, stride = self.word(self.block, SCRATCH, "ptr"), self.word(self.block, STRIDE)

        def look(slot: Value, faults: Value) -> list[Value]:
            return [b.op("or", faults, self.word(b.offset(scratch, b.mul(slot, stride)), STATUS))]

        def lost() -> list[Value]:
            self.change("Py_DecRef", outputs)
            self.change("Py_IncRef", self.known("false"))
            return [self.known("false")]

        (faults,) = b.loop(0, self.word(self.block, SLOTS), 1, look, [i64(0)])
        return b.when(self.equal(faults, 0), lambda: [outputs], lost)
