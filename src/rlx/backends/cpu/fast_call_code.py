"""Code of fast calls: emits `repeat(self, inputs)`, a CPython builtin, as LLVM IR."""

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
    HELD,
    INPUT_COUNT,
    INPUTS,
    JOB,
    LEAF_WORDS,
    MASK,
    MOVED,
    MOVED_COUNT,
    MOVED_WORDS,
    NAME,
    OUTPUT_COUNT,
    OUTPUTS,
    RANK,
    REFERENCES,
    REUSED,
    REUSES,
    SHAPE,
    SIZES,
    TABLE,
    TYPE,
    WEAK,
    WORDS,
)

NO, YES = const("i1", False), const("i1", True)


def repeat(b: Builder, self: Value, inputs: Value) -> Value:
    """`self` is the array that holds the block."""
    return _Repeat(b, b.load("ptr", b.offset(self, DATA), align=8), inputs).emit()


class _Repeat:
    """Holds a reference to each input and output from lookup until the end of the call."""

    def __init__(self, b: Builder, block: Value, inputs: Value) -> None:
        self.b, self.block, self.inputs = b, block, inputs
        self.table, self.held = self.word(block, TABLE, "ptr"), self.word(block, HELD, "ptr")
        self.input_count, self.output_count = self.word(block, INPUT_COUNT), self.word(block, OUTPUT_COUNT)
        self.job = self.word(self.word(block, JOB, "ptr"), 0, "ptr")

    def word(self, pointer: Value, offset: int, type_: str = "i64") -> Value:
        return self.b.load(type_, self.b.offset(pointer, offset), align=4 if type_ == "i32" else 8)

    def place(self, table: Value, index: Value, words: int = 1) -> Value:
        return self.b.offset(table, self.b.mul(index, words), "i64")

    def api(self, name: str) -> Value:
        """A CPython function or object from the table."""
        return self.word(self.table, API[name], "ptr")

    def call(self, result: str, name: str, *arguments: Value) -> Value:
        return self.b.assign(result, f"call {result} {self.api(name).text}({', '.join(map(str, arguments))})")

    def change(self, name: str, *arguments: Value) -> None:
        self.b.call_pointer(self.api(name), *arguments)

    def equal(self, a: Value, b: Value | int) -> Value:
        return self.b.icmp("eq", a, b)

    def exists(self, a: Value) -> Value:
        return self.b.icmp("ne", a, NULL)

    def both(self, a: Value, b: Value) -> Value:
        return self.b.op("and", a, b)

    def emit(self) -> Value:
        b = self.b
        everything = b.add(self.input_count, self.output_count)
        b.loop(0, everything, 1, lambda i: b.store(NULL, self.place(self.held, i), align=8))
        fits = self.both(self.exists(self.job), self.equal(self.word(self.inputs, TYPE, "ptr"), self.api("dict")))
        (fits,) = b.when(fits, lambda: [self.equal(self.call("i64", "PyDict_Size", self.inputs), self.input_count)],
                         lambda: [NO])  # fmt: skip
        (fits,) = b.loop(0, self.input_count, 1, self.check_input, [fits])
        (outputs,) = b.when(fits, self.make_outputs, lambda: [NULL])
        (result,) = b.when(self.exists(outputs), lambda: self.run(outputs), self.decline)
        # Py_DecRef accepts NULL.
        b.loop(0, everything, 1, lambda i: self.change("Py_DecRef", self.word(self.place(self.held, i), 0, "ptr")))
        return result

    def decline(self) -> list[Value]:
        """Returns None. Whatever went wrong will fail again on the slow path, where Python reports it."""
        self.change("PyErr_Clear")
        self.change("Py_IncRef", self.api("none"))
        return [self.api("none")]

    # -- inputs -------------------------------------------------------------------------------------------------------
    def check_input(self, i: Value, fits: Value) -> list[Value]:
        b = self.b
        leaf = self.place(self.word(self.block, INPUTS, "ptr"), i, LEAF_WORDS)

        def look_up() -> list[Value]:
            array = self.call("ptr", "PyDict_GetItemWithError", self.inputs, self.word(leaf, NAME, "ptr"))
            self.change("Py_IncRef", array)
            b.store(array, self.place(self.held, i), align=8)
            return b.when(self.exists(array), lambda: self.compare(leaf, array), lambda: [NO])

        return b.when(fits, look_up, lambda: [NO])

    def compare(self, leaf: Value, array: Value) -> list[Value]:
        """Whether `array` is exactly an ndarray (no subclass) with a leaf's element type and shape."""
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

        is_array = self.equal(self.word(array, TYPE, "ptr"), self.api("array"))
        return b.when(is_array, of_elements, lambda: [NO])

    # -- outputs ------------------------------------------------------------------------------------------------------
    def make_outputs(self) -> list[Value]:
        """A list of output arrays; NULL if memory is short."""
        b = self.b
        outputs = self.call("ptr", "PyList_New", self.output_count)

        def release() -> list[Value]:
            self.change("Py_DecRef", outputs)
            return [NULL]

        (complete,) = b.loop(0, self.output_count, 1, lambda i, ok: self.make(outputs, i, ok), [self.exists(outputs)])
        return b.when(complete, lambda: [outputs], release)

    def make(self, outputs: Value, i: Value, complete: Value) -> list[Value]:
        b = self.b
        reused = self.word(self.block, REUSED, "ptr")
        leaf = self.place(self.word(self.block, OUTPUTS, "ptr"), i, LEAF_WORDS)

        def reuse(array: Value) -> list[Value]:
            self.change("Py_IncRef", array)
            return [array]

        def allocate() -> list[Value]:
            array = self.call("ptr", "PyObject_CallObject", self.api("empty"), self.word(leaf, NAME, "ptr"))

            def keep() -> None:
                self.change("Py_IncRef", array)
                self.call("i32", "PyList_SetItem", reused, i, array)

            b.when(self.both(self.exists(array), b.icmp("ne", self.word(self.block, REUSES), 0)), keep)
            return [array]

        def output() -> list[Value]:
            before = self.call("ptr", "PyList_GetItem", reused, i)
            # With no other reference, and only its elements changed, it is as good as a new array, unless a weak
            # reference could observe its return.
            free = self.equal(self.word(before, REFERENCES, "i32"), 1)
            (free,) = b.when(free, lambda: self.compare(leaf, before), lambda: [NO])
            (free,) = b.when(free, lambda: [self.equal(self.word(before, WEAK, "ptr"), NULL)], lambda: [NO])
            (array,) = b.when(free, lambda: reuse(before), allocate)
            b.store(array, self.place(self.held, b.add(self.input_count, i)), align=8)
            self.change("Py_IncRef", array)
            self.call("i32", "PyList_SetItem", outputs, i, array)  # steals the reference
            return [self.exists(array)]

        return b.when(complete, output, lambda: [NO])

    # -- the run ------------------------------------------------------------------------------------------------------
    def run(self, outputs: Value) -> list[Value]:
        """Returns the outputs, or False if a thread has reported a fault."""
        b = self.b
        words, moved = self.word(self.block, WORDS, "ptr"), self.word(self.block, MOVED, "ptr")

        def move(i: Value) -> None:
            entry = self.place(moved, i, MOVED_WORDS)
            array = self.word(self.place(self.held, self.word(entry, 8)), 0, "ptr")
            b.store(
                b.add(self.word(array, DATA), self.word(entry, 16)), self.place(words, self.word(entry, 0)), align=8
            )

        b.loop(0, self.word(self.block, MOVED_COUNT), 1, move)
        thread = self.call("ptr", "PyEval_SaveThread")
        b.call("i64", "call", self.job, self.block)
        self.change("PyEval_RestoreThread", thread)
        scratch, stride = self.word(self.block, SCRATCH, "ptr"), self.word(self.block, STRIDE)

        def look(slot: Value, faults: Value) -> list[Value]:
            return [b.op("or", faults, self.word(b.offset(scratch, b.mul(slot, stride)), STATUS))]

        def failed() -> list[Value]:
            self.change("Py_DecRef", outputs)
            self.change("Py_IncRef", self.api("false"))
            return [self.api("false")]

        (faults,) = b.loop(0, self.word(self.block, SLOTS), 1, look, [i64(0)])
        return b.when(self.equal(faults, 0), lambda: [outputs], failed)
