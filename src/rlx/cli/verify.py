"""`rlx verify MODEL`: checks a model's files, its results on this machine, and parity with `transformers`.

First checksums, then checks of rlx against itself (weights, tokenizer, machine code against NumPy, decode against
prefill, one thread against two), then parity with `transformers`, if that is installed.

Quantised weights are multiplied by int8 activations, whose rounding is larger than the differences that a defect might
cause. So their products are compared on activations that int8 represents exactly, and the whole model is compared with
NumPy and `transformers` in f32.
"""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from rlx import hub
from rlx.arrays import Array
from rlx.cli import console, parity
from rlx.cli.loading import DEVICE_HELP, load
from rlx.cli.parity import Difference
from rlx.dtypes import DType
from rlx.engine.language_model import LanguageModel
from rlx.engine.page_pool import PagePool
from rlx.engine.sampler import BatchSampling
from rlx.engine.vision_model import VisionModel
from rlx.errors import FormatError, RlxError
from rlx.fast_dataclass import dataclass
from rlx.formats import TensorEntry, TensorFile
from rlx.formats.gguf_quants import dequantise
from rlx.formats.tokenizer import Tokenizer
from rlx.hub.catalogue import find
from rlx.hub.pull import WEIGHTS, model_folder
from rlx.hub.store import file_sha256, file_size
from rlx.ir.graph import Graph
from rlx.models.load import open_checkpoint
from rlx.profile import CompileProfile
from rlx.runtime.session import Session

TEXTS = (
    "The quick brown fox jumps over the lazy dog, 42 times; then it sleeps.",
    "Ein Käfer läuft über die Straße. 東京は日本の首都です。 Привет! 🙂",
    "def f(x):\n    return x ** 2  # a comment\n\n\nprint(f(3))\n",
)
PROMPT = TEXTS[0]
PICTURES = (((1, 0), (0, 1), (1, 1)), ((3, 1), (1, 2), (2, 3)), ((0, 2), (5, 0), (1, 4)))
SAMPLE = 1_000_000  # elements checked per tensor
LARGEST = 1e6  # largest plausible weight
SMALL = 300_000_000  # weights of a model that NumPy runs in seconds
SAME = 1e-5  # difference of log-probabilities of the same logits: rounding only
CLOSE = 1e-3  # relative to the largest logit: far above rounding, far below a defect
ALIKE = 0.5  # share of equal tokens: int8 activations change one choice in ten, a defect nearly all
APART = 0.25  # relative to the largest element: int8 activations change hundredths
SHARP = 1e-4  # relative to the largest element of a product: far above f32 rounding, below one wrong quantised weight
PRODUCT_ROWS, PRODUCT_COLUMNS = 21, 99  # several kernel tiles, and a remainder
NEAR = 0.05  # relative to the largest element: bf16 products change hundredths
DIVERGENCE = 0.01  # mean KL divergence in nats: bf16 products change thousandths
CHOICES = 0.9  # share of tokens with the same likeliest next one
GREEDY = 16  # tokens


@dataclass(frozen=True)
class Check:
    """The result of a check; `ok` is None if it was skipped."""

    name: str
    ok: bool | None
    detail: str

    def __str__(self) -> str:
        return f"{ {True: 'ok', False: 'FAILED', None: 'skipped'}[self.ok]:8} {self.name:20} {self.detail}"


def add(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    command = commands.add_parser("verify", help="check a model: hashes, weights, machine code, transformers")
    command.add_argument("model", help="a model on this machine")
    command.add_argument("--device", default="cpu", help=DEVICE_HELP)
    command.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    results: list[Check] = []
    for check in checks(arguments.model, arguments.device):
        print(check, flush=True)
        results.append(check)
    failed = [c.name for c in results if c.ok is False]
    ran = sum(c.ok is not None for c in results)
    print(f"{ran} checks ran, " + (f"FAILED: {', '.join(failed)}" if failed else "all fine"))
    return 1 if failed else 0


def checks(name: str, device: str = "cpu") -> Iterator[Check]:
    """Run all checks in order; stops if the checksum fails."""
    checksum = check_files(name)
    yield checksum
    if checksum.ok is False:
        return
    path = hub.resolve(name, offline=True).path
    with open_checkpoint(path).file as file:
        yield check_weights(file)
        size = sum(file.entry(n).size for n in file.names)
        packed = any(file.entry(n).storage.is_packed for n in file.names)
        exact = "f32" if packed else "auto"
    answers: dict[str, Array] = {}
    with console.status("loading"):
        model = load(name, threads=2, offline=True, device=device)
    with model:
        yield check_tokenizer(model.checkpoint.tokenizer)
        yield _run_check("runs", lambda: _runs(model, answers))
        if "here" not in answers:
            return
        if isinstance(model, LanguageModel):
            yield _run_check("decode is prefill", lambda: _decode_is_prefill(model))
        if packed:
            yield _run_check("packed products", lambda: check_products(model.checkpoint.file, model.profile))
        elsewhere = model.compiled.device != "cpu"
    if elsewhere:  # the other checks are those of the CPU's code
        yield _run_check("cpu", lambda: _compare_with_cpu(name, answers["here"]))
        return
    yield _run_check("threads", lambda: _compare_threads(name, answers["here"]))
    if packed:
        yield _run_check("8 bits", lambda: _compare_with_f32(name, exact, answers["here"]))
    if size <= SMALL:
        yield _run_check("reference", lambda: _compare_with_reference(name, exact))
    else:
        yield Check(
            "reference", None, f"{size / 1e6:.0f} M weights are too many for NumPy, at most {SMALL / 1e6:.0f} M"
        )
    missing = [m for m in ("torch", "transformers") if importlib.util.find_spec(m) is None]
    if missing:
        hint = "pip install torch==2.13.0 transformers"  # plain torch would bring gigabytes for GPUs
        yield Check("transformers", None, f"{' and '.join(missing)} not installed: {hint}")
    else:
        yield _run_check("transformers", lambda: _compare_with_transformers(path, exact))


def _run_check(name: str, check: Callable[[], Check]) -> Check:
    """Run a check; one that raises has failed."""
    with console.status(name):
        try:
            return check()
        except parity.Unavailable as error:
            return Check(name, None, str(error))
        except RlxError as error:
            return Check(name, False, "; ".join([str(error), *(line.strip() for line in error.notes)]))


# -- files -----------------------------------------------------------------------------------------------------------
def check_files(name: str) -> Check:
    """Compare sizes and hashes of all files with the catalogue."""
    entry = None if Path(name).exists() else find(name)
    if entry is None:
        files = hub.resolve(name, offline=True)
        weights = [f for f in files.files if f.suffix in WEIGHTS]
        if not weights:
            raise FormatError(
                f"{files.path}: no weights are there", hint="expected safetensors, GGUF or a llama2.c .bin"
            )
        sums = "; ".join(f"sha256 of {f.name}: {file_sha256(f)}" for f in weights)
        return Check("checksum", None, f"nothing to compare with; {sums}")
    folder = model_folder(entry)
    if not folder.is_dir():
        hub.resolve(name, offline=True)  # raises how to get it
    wrong = []
    for file in entry.files:
        path = folder / file.name
        size = file_size(path)
        if size is None:
            wrong.append(f"{file.name} is absent")
        elif size != file.size:
            wrong.append(f"{file.name} has {size} bytes, expected {file.size}")
        elif (sha256 := file_sha256(path)) != file.sha256:
            wrong.append(f"{file.name} has sha256 {sha256}, expected {file.sha256}")
    if wrong:
        return Check("checksum", False, f"{'; '.join(wrong)}; rlx rm {entry.name}, then rlx pull {entry.name}")
    return Check("checksum", True, f"{len(entry.files)} files as in the catalogue")


def check_weights(file: TensorFile) -> Check:
    """Check samples of every tensor: finite, of plausible size, and not constant in a matrix."""
    wrong = []
    for name in file.names:
        entry = file.entry(name)
        if not entry.size or not entry.shape:
            continue
        values = _sample(file, entry)
        if not np.isfinite(values).all():
            wrong.append(f"{name} holds NaN or infinity")
        elif float(np.abs(values).max()) > LARGEST:
            wrong.append(f"{name} holds {float(np.abs(values).max()):.1e}")
        elif len(entry.shape) > 1 and values.size > 1 and float(values.std()) == 0:
            wrong.append(f"{name} holds {float(values[0]):g} only")
    if wrong:
        return Check("weights", False, "; ".join(wrong[:4]) + (f" and {len(wrong) - 4} more" if wrong[4:] else ""))
    return Check("weights", True, f"{len(file)} tensors, up to {SAMPLE / 1e6:.0f} M weights of each: finite and sane")


def _sample(file: TensorFile, entry: TensorEntry) -> Array:
    """Evenly spaced rows of a tensor, or all of a small one."""
    rows = file.array(entry.name)
    count = min(len(rows), max(1, SAMPLE * len(rows) // entry.size))
    picked = np.linspace(0, len(rows) - 1, count).astype(int)
    sample = np.ascontiguousarray(rows if count == len(rows) or len(entry.shape) == 1 else rows[picked])
    return dequantise(sample, entry.storage, sample.size * entry.storage.block)


def check_tokenizer(tokenizer: Tokenizer | None) -> Check:
    """Encode and decode texts; if the tokenizer changes text (such as to lower case), the ids must round-trip."""
    if tokenizer is None:
        return Check("tokenizer", None, "the model has none")
    exact, unknown = 0, 0
    for text in TEXTS:
        ids = tokenizer.encode(text, add_special=False)
        if tokenizer.unk_id in ids:
            unknown += 1  # unknown tokens do not round-trip
            continue
        back = tokenizer.decode(ids)
        exact += back.strip(" ") == text.strip(" ")
        if back.strip(" ") != text.strip(" ") and tokenizer.encode(back, add_special=False) != ids:
            return Check("tokenizer", False, f"{text!r} comes back as {back!r}, and that has other ids")
    parts = {
        "come back exactly": exact,
        "as the same ids": len(TEXTS) - exact - unknown,
        "have unknown tokens": unknown,
    }
    summary = ", ".join(f"{count} {how}" for how, count in parts.items() if count)
    return Check("tokenizer", unknown < len(TEXTS), f"of {len(TEXTS)} texts {summary}")


# -- rlx against itself ----------------------------------------------------------------------------------------------
def _is_decoder(model: Any) -> bool:
    return isinstance(model, LanguageModel)


def answer_of(model: Any) -> Array:
    """The compared result: logits after each token of the prompt, or vectors of texts, tokens or images."""
    if isinstance(model, VisionModel):
        return model.encode_image(pictures())
    if not _is_decoder(model) and model.checkpoint.tokenizer is None:
        states: Array = model.apply({}, prompt_tokens(model))
        return states
    result: Array = model.logits(prompt_tokens(model)) if _is_decoder(model) else model.embed(list(TEXTS))
    return result


def pictures() -> list[Array]:
    """Test images: coloured stripes in three directions."""
    y, x = np.mgrid[:240, :320]
    return [np.stack([(a * x + b * y) % 256 for a, b in ways], -1).astype(np.uint8) for ways in PICTURES]


def prompt_tokens(model: Any) -> list[int]:
    """The prompt as tokens, or arbitrary ids if there is no tokenizer."""
    if model.checkpoint.tokenizer is not None:
        tokens: list[int] = model.tokenizer.encode(PROMPT)
        return tokens[: model.context - GREEDY - 1]
    vocabulary = int(model.checkpoint.config.vocab)
    return [(7 * i + 3) % vocabulary for i in range(24)]


def _runs(model: Any, answers: dict[str, Array]) -> Check:
    values = answer_of(model)
    if not np.isfinite(values).all():
        return Check("runs", False, "the result holds NaN or infinity")
    answers["here"] = values
    shape = "×".join(map(str, values.shape))
    return Check("runs", True, f"{shape} finite {'logits' if _is_decoder(model) else 'vectors'}")


def _decode_is_prefill(model: LanguageModel) -> Check:
    """Compare prefixes and decode steps with one prefill: same bits, same choices."""
    tokens = prompt_tokens(model)
    logits = model.logits(tokens)
    ends = [model.logits(tokens[: n + 1])[-1] for n in range(0, len(tokens), max(len(tokens) // 8, 1))]
    for n, end in zip(range(0, len(tokens), max(len(tokens) // 8, 1)), ends, strict=True):
        if end.tobytes() != logits[n].tobytes():
            return Check("decode is prefill", False, f"the logits after {n + 1} tokens depend on what comes later")
    done = model.generate(tokens, max_tokens=GREEDY, temperature=0.0, logprobs=1)
    generated, steps = done.tokens, done.logprobs or []
    rows = model.logits([*tokens, *generated])[len(tokens) - 1 : -1, : model.vocab_size].astype(np.float64)
    again = rows.argmax(axis=1).tolist()
    if again != generated:
        return Check("decode is prefill", False, f"decoding gives {generated}, one prefill of it {again}")
    shifted = rows - rows.max(axis=1, keepdims=True)
    wanted = shifted[np.arange(len(generated)), generated] - np.log(np.exp(shifted).sum(axis=1))
    gap = float(np.abs([step.logprob for step in steps] - wanted).max(initial=0.0))
    if gap > SAME:
        return Check("decode is prefill", False, f"decoding and one prefill give log-probabilities {gap:.1e} apart")
    same = f"same bits at {len(ends)} lengths, same {len(generated)} greedy tokens"
    return Check("decode is prefill", True, f"{same}, log-probabilities at most {gap:.0e} apart")


def _compare_with_cpu(name: str, here: Array) -> Check:
    """Compare the results of another device with the CPU's, which has sums in another order and widens 16 bits."""
    with load(name, threads=2, offline=True) as model:
        expected = answer_of(model)
        is_decoder = _is_decoder(model)
    gap = float(np.abs(here - expected).max()) / max(float(np.abs(expected).max()), 1e-30)
    if not is_decoder:
        return Check("cpu", gap <= NEAR, f"at most {gap:.1e} of the largest element apart ({NEAR} is allowed)")
    divergence, alike = divergence_of(expected, here)
    ok = divergence <= DIVERGENCE and alike >= CHOICES
    words = f"KL divergence {divergence:.1e} ({DIVERGENCE} is allowed), same choice at {alike:.0%} of tokens"
    return Check("cpu", ok, f"{words}, logits at most {gap:.1e} of the largest apart")


def divergence_of(expected: Array, actual: Array) -> tuple[float, float]:
    """The mean KL divergence of the distributions by logits `[tokens, vocab]`, and the share of equal choices."""
    logs = [
        x.astype(np.float64) - np.logaddexp.reduce(x.astype(np.float64), -1, keepdims=True) for x in (expected, actual)
    ]
    divergence = (np.exp(logs[0]) * (logs[0] - logs[1])).sum(-1).mean()
    return float(divergence), float((expected.argmax(-1) == actual.argmax(-1)).mean())


def _compare_threads(name: str, here: Array) -> Check:
    with load(name, threads=1, offline=True) as model:
        alone = answer_of(model)
    if alone.tobytes() != here.tobytes():
        return Check("threads", False, f"1 and 2 threads differ by {float(np.abs(alone - here).max()):.1e}")
    return Check("threads", True, "1 and 2 threads give the same bits")


def check_products(file: TensorFile, profile: CompileProfile) -> Check:
    """Compare products with quantised weights of each type and width, on columns of three tensors, with NumPy float64.

    The activations are exact in int8, with the maximum in each block, so only f32 rounds. One product is plain and two
    are gated, as in models; one row and many rows use different kernels.
    """
    kinds: dict[tuple[DType, int], list[str]] = {}
    for entry in map(file.entry, file.names):
        if entry.storage.is_packed and len(entry.shape) > 1:
            kinds.setdefault((entry.storage, entry.shape[-1]), []).append(entry.name)
    errors = {f"{storage} {k} wide": _product_error(file, names, profile) for (storage, k), names in kinds.items()}
    wrong = [f"{kind} {error:.1e}" for kind, error in errors.items() if not error < SHARP]
    if wrong:
        return Check("packed products", False, f"{', '.join(wrong)} of the largest value from NumPy in float64")
    worst = f"at most {max(errors.values(), default=0):.0e} of the largest value from NumPy in float64"
    return Check(
        "packed products", True, f"{', '.join(errors)}: {worst}, on numbers that 8 bits hold ({SHARP} is allowed)"
    )


def _product_error(file: TensorFile, names: Sequence[str], profile: CompileProfile) -> float:
    """The largest difference between machine code and NumPy, relative to the largest value."""
    entry = file.entry(names[0])
    k, weights, graph = entry.shape[-1], dict[str, Array](), Graph("products")
    for i, part in enumerate(("plain", "gate", "up")):
        rows = file.array(names[len(names) * i // 3]).reshape(-1, k // entry.storage.block)
        weights[part] = rows[np.linspace(0, len(rows) - 1, PRODUCT_COLUMNS).astype(int)]
    x = np.random.default_rng(0).integers(-127, 128, (PRODUCT_ROWS, k)).astype(np.float32) / 128
    x[:, :: entry.storage.block] = 127 / 128
    left = graph.input("x", ("rows", k))
    shape = (PRODUCT_COLUMNS, k)
    products = [left @ graph.param(part, shape, entry.storage).dequantise().mT for part in weights]
    graph.set_outputs([products[0], products[1].silu() * products[2]])
    compiled = Session().compile(graph, profile=profile)
    compiled.set_params(weights)
    numbers = (dequantise(w, entry.storage, w.size * entry.storage.block).reshape(shape) for w in weights.values())
    plain, gate, up = (x @ w.astype(np.float64).T for w in numbers)
    wanted = plain, gate * (1 + np.tanh(gate / 2)) / 2 * up
    pairs = [(a, b[: len(a)]) for n in (1, len(x)) for a, b in zip(compiled.run({"x": x[:n]}), wanted, strict=True)]
    return float(np.max([Difference.of(a, b, logits=False).largest for a, b in pairs]))  # NaN if one is NaN


def _compare_with_f32(name: str, exact: str, here: Array) -> Check:
    """Compare int8 activations with f32, with a wide tolerance."""
    with load(name, threads=2, offline=True, precision=exact) as model:
        difference = Difference.of(here, answer_of(model), logits=_is_decoder(model))
    if difference.agreement is None:
        good, allowed = difference.largest < APART, f"{APART} is allowed"
    else:
        good, allowed = difference.agreement > ALIKE, f"more than {ALIKE:.0%} must"
    return Check("8 bits", good, f"activations in 8 bits and in f32: {difference} ({allowed})")


def _compare_with_reference(name: str, precision: str) -> Check:
    """Compare a run of machine code with NumPy, which evaluates the graph op by op."""
    with load(name, offline=True, precision=precision) as model:
        reference = Session("reference").compile(model.built.module)
        for param in reference.param_types:
            computed = model.built.params.get(param)
            reference.set_param(param, model.checkpoint.weights.array(param) if computed is None else computed)
        # separate inputs: states are updated in place
        actual, wanted = (compiled.run(_inputs(model))[0] for compiled in (model.compiled, reference))
    rows = int(np.prod(actual.shape[:-1]))
    difference = Difference.of(actual.reshape(rows, -1), wanted.reshape(rows, -1), logits=_is_decoder(model))
    return Check("reference", difference.largest < CLOSE, f"machine code and NumPy: {difference}")


def _inputs(model: Any) -> dict[str, Array]:
    """Graph inputs for one image or one sequence, with logits after each token."""
    if isinstance(model, VisionModel):
        return model.inputs(model.prepare(pictures()[0])[None])
    tokens = prompt_tokens(model)
    row, count = np.array([tokens], np.int32), len(tokens)
    inputs = {
        "tokens": row,
        "positions": np.arange(count, dtype=np.int32)[None],
        "last_token_idx": np.arange(count, dtype=np.int32),
        "lengths": np.array([count], np.int32),
        "token_types": np.zeros_like(row),
        "attention_mask": np.ones(row.shape, np.float32),
    }
    if model.built.cache is not None:
        cache = PagePool(model.built.cache, model.context).new(1)
        cache.reserve(count)
        cache.prepare_write(0, 0, count)
        inputs |= cache.rows(0, 1) | BatchSampling().draw([None] * count)
    return {name: inputs[name] for name in model.compiled.input_types}


# -- transformers ----------------------------------------------------------------------------------------------------
def _compare_with_transformers(path: Path, precision: str) -> Check:
    with load(path, offline=True, precision=precision) as model:
        if isinstance(model, LanguageModel):
            wanted = parity.logits(model.checkpoint, prompt_tokens(model))
        elif isinstance(model, VisionModel):
            wanted = parity.image_vectors(model.checkpoint, [model.prepare(image) for image in pictures()])
        elif model.checkpoint.tokenizer is None:
            wanted = parity.states(model.checkpoint, prompt_tokens(model))
        else:
            wanted = parity.vectors(model.checkpoint, model, list(TEXTS))
        difference = Difference.of(answer_of(model), wanted, logits=_is_decoder(model))
    return Check("transformers", difference.largest < CLOSE, str(difference))
