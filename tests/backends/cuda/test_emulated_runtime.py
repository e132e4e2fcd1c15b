"""The runtime on an emulated GPU: runs that the host reads behind the device, transfers, DLPack, size classes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import tiny_llama
from emulator import EmulatedGpu, emulated_gpu, missing

import rlx
from rlx.backends.cuda import transfers
from rlx.backends.cuda.memory import CudaAllocator, CudaArray
from rlx.backends.cuda.targets import SM_90
from rlx.engine.language_model import LanguageModel
from rlx.errors import BindError, DTypeError, KernelError

pytestmark = pytest.mark.skipif(bool(missing()), reason=missing())
f32 = np.float32


def rows_graph() -> rlx.Graph:
    """Rows of a table by index, which faults outside, and the next indices."""
    g = rlx.Graph("rows")
    i = g.input("i", ("n",), "i32")
    return g.set_outputs([g.gather(g.input("table", (5, 3)), i, axis=0), (i + 1) % 5])


def test_runs_are_read_behind_the_device() -> None:
    table = np.arange(15, dtype=f32).reshape(5, 3)
    with emulated_gpu() as gpu:
        compiled = rlx.compile(rows_graph(), "cuda")
        runs = [compiled.enqueue({"table": table, "i": np.array([3, 1], np.int32)}, (0,))]
        waits = gpu.waits
        for _ in range(4):  # each takes its indices from the run before it, which nobody has read
            runs.append(compiled.enqueue({"table": table, "i": runs[-1].outputs[1]}, (0,)))
        assert gpu.waits == waits
        rows = [run.read()[0] for run in runs]
        assert gpu.waits == waits + 5
        for number, values in enumerate(rows):
            np.testing.assert_array_equal(values, table[[(3 + number) % 5, (1 + number) % 5]])
        assert runs[0].read()[0].tolist() == rows[0].tolist()  # once more, from the device


def test_faults_are_raised_by_the_run_that_has_them() -> None:
    table = np.zeros((5, 3), f32)
    with emulated_gpu():
        compiled = rlx.compile(rows_graph(), "cuda")
        indices = [np.array([i, 0], np.int32) for i in (1, 7, 2)]
        before, wrong, after = (compiled.enqueue({"table": table, "i": i}, (0,)) for i in indices)
        before.read()
        with pytest.raises(KernelError, match="outside"):
            wrong.read()
        with pytest.raises(KernelError, match="outside"):  # it was started before the fault was known
            after.read()
        compiled.enqueue({"table": table, "i": indices[2]}, (0,)).read()
        dropped = compiled.enqueue({"table": table, "i": indices[1]}, (0,))
        del dropped
        with pytest.raises(KernelError, match="outside"):  # a fault that nobody has read is not lost
            compiled.run({"table": table, "i": indices[2]})
        compiled.run({"table": table, "i": indices[2]})


def test_large_copies_go_through_pinned_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "CHUNK", 1 << 16)
    monkeypatch.setattr(transfers, "DIRECT", 1 << 10)
    values = np.random.default_rng(0).random((3, 100_003))
    with emulated_gpu() as gpu:
        monkeypatch.setattr("rlx.backends.cuda.memory.STAGED", 0)
        array = CudaAllocator(0).upload(values)
        assert array.host is None
        copies = gpu.downloads
        np.testing.assert_array_equal(array.numpy(), values)
        assert gpu.downloads - copies == -(-values.nbytes >> 16)
        assert sum(map(len, gpu.slots._free.values())) <= 4  # slots are used again


def test_a_host_far_ahead_of_the_device_waits() -> None:
    with emulated_gpu() as gpu:
        gpu.__dict__["is_over"] = lambda event: False
        waits = gpu.waits
        slots = [gpu.slots.take(100) for _ in range(transfers.MOST_SLOTS)]
        for slot in slots:
            slot.event = gpu.mark(slot.event)
            gpu.slots.give_back(slot)
        assert gpu.waits == waits and gpu.slots.take(100) is slots[0] and gpu.waits == waits + 1
        assert gpu.slots.take(100) not in slots  # fewer wait now: another one


def test_weights_of_mapped_files_are_copied_once(tmp_path: Path) -> None:
    stored = np.random.default_rng(0).random((1024, 1024)).astype(f32)
    stored.tofile(tmp_path / "w")
    mapped = np.asarray(np.memmap(tmp_path / "w", f32, "r").reshape(1024, 1024))
    g = rlx.Graph("rows")
    g.set_outputs([g.gather(g.param("w", (1024, 1024)), g.input("i", (2,), "i32"), axis=0)])
    uploads: list[tuple[str, int]] = []
    with emulated_gpu():
        compiled = rlx.compile(g, "cuda")
        compiled.set_param("w", mapped)
        compiled.prepare(lambda name, size: uploads.append((name, size)))
        (rows,) = compiled.run({"i": np.array([5, 1023], np.int32)})
        np.testing.assert_array_equal(np.asarray(rows), stored[[5, 1023]])
        weight = compiled.executable.weights["w"]
        assert isinstance(weight, CudaArray) and weight.host is None
    assert uploads == [("w", mapped.nbytes)]


# -- DLPack -----------------------------------------------------------------------------------------------------------
class Foreign:
    """An array of another library on the GPU."""

    def __init__(self, array: CudaArray, device: tuple[int, int] = (2, 0)) -> None:
        self.array, self.place, self.streams = array, device, list[Any]()

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.place

    def __dlpack__(self, *, stream: Any = None) -> Any:
        self.streams.append(stream)
        return self.array.__dlpack__()


@pytest.mark.parametrize("kind", [f32, ml_dtypes.bfloat16, np.int64, np.bool_])
def test_arrays_of_other_libraries_are_inputs_without_a_copy(kind: Any) -> None:
    values = np.array([[1, 0, 2], [0, 3, 4]]).astype(kind)
    with emulated_gpu() as gpu:
        gpu.__dict__["_stream"] = 77
        foreign = Foreign(CudaAllocator(0).upload(values))
        shared = CudaAllocator(0).borrow(foreign)
        assert shared is not None and shared.start == foreign.array.start and foreign.streams == [77]
        assert (shared.shape, shared.dtype) == (values.shape, values.dtype)
        g = rlx.Graph("columns")
        g.set_outputs([g.transpose(g.input("x", ("n", 3), values.dtype), axes=(1, 0))])
        (result,) = rlx.compile(g, "cuda").run({"x": foreign})
        np.testing.assert_array_equal(np.asarray(result), values.T)
        allocated = foreign.array.memory
        del shared, result
        assert allocated.address in gpu.blocks  # the owner still has it


def test_what_cannot_be_borrowed() -> None:
    with emulated_gpu() as gpu:
        gpu.__dict__["_stream"] = 77
        allocator = CudaAllocator(0)
        array = allocator.upload(np.zeros((4, 6), f32))
        assert allocator.borrow(Foreign(array, (2, 1))) is None  # of another GPU
        assert allocator.borrow(object()) is None
        with pytest.raises(BindError, match="pass a contiguous array"):
            allocator.borrow(Foreign(allocator.part(array, slice(0, 4), slice(1, 3))))
        with pytest.raises(DTypeError, match="float8"):
            allocator.borrow(Foreign(allocator.upload(np.zeros(3, ml_dtypes.float8_e4m3fn))))


# -- models -----------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    tiny_llama.write(path, num_hidden_layers=1)
    return path


def loaded(folder: Path, device: str) -> LanguageModel:
    model = rlx.load(folder, device=device)
    assert isinstance(model, LanguageModel)
    return model


def prepared(model: LanguageModel) -> int:
    return len(model.compiled.executable._prepared)  # type: ignore[attr-defined]


def test_tokens_reach_the_host_behind_the_device(folder: Path) -> None:
    """One wait per token, for a step that is over or nearly so: the next one has been started before."""
    prompts = [[3, 1, 4, 1, 5], [9, 2, 6]]
    wanted = [c.tokens for c in loaded(folder, "cpu").generate(prompts, max_tokens=12)]
    with emulated_gpu() as gpu:
        model = loaded(folder, "cuda")
        assert [c.tokens for c in model.generate(prompts, max_tokens=12)] == wanted
        model.caches.clear()
        order = watched_order(model, gpu)
        assert model.generate(prompts[0], max_tokens=12).tokens == wanted[0]
    steps = order[order.index("step") :]
    assert steps == ["step", *["step", "wait"] * 10, "wait"]  # a step is read after the next one has started


def watched_order(model: LanguageModel, gpu: EmulatedGpu) -> list[str]:
    """Records when decode steps start and when the host waits."""
    order: list[str] = []
    enqueue, wait = model.compiled.executable.enqueue, gpu.wait

    def on_step(*args: Any) -> Any:
        order.append("step")
        return enqueue(*args)

    def on_wait(event: Any) -> None:
        order.append("wait")
        wait(event)

    model.compiled.executable.__dict__["enqueue"] = on_step
    gpu.__dict__["wait"] = on_wait
    return order


def test_prompts_of_all_lengths_take_few_graphs(folder: Path) -> None:
    classes = {SM_90.padded(n) for n in range(1, 257)}
    assert all(n <= SM_90.padded(n) <= max(1.5 * n, 16) for n in range(1, 257)) and len(classes) == 10
    assert SM_90.padded(1) == 1
    with emulated_gpu():
        model = loaded(folder, "cuda")
        for length in (17, 18, 20, 22, 24):
            model.generate([length] * length, max_tokens=2)
        assert prepared(model) == 2  # one for 17 to 24 tokens, one for decoding


def test_loading_many_weights_shows_their_progress(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bars: list[tuple[str, int, list[int]]] = []

    @contextmanager
    def bar(label: str, total: int) -> Iterator[Any]:
        bars.append((label, total, []))
        yield bars[-1][2].append

    monkeypatch.setattr("rlx.engine.weights.progress_bar", bar)
    monkeypatch.setenv("RLX_CACHE", "off")  # no snapshot: weights come from the file
    with emulated_gpu():
        loaded(folder, "cuda")
        assert not bars  # a small model
        monkeypatch.setattr("rlx.engine.weights.SLOW", 1)
        loaded(folder, "cuda")
    ((label, total, ticks),) = bars
    assert label == "loading to cuda" and ticks == sorted(ticks) and ticks[-1] == total
