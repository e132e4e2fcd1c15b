"""Writes docs/models.md: all families, and how far a small random model of each is from `transformers`.

Run it with torch and transformers: python tests/models/model_table.py --update. test_model_table.py keeps the page to
the register of families, and measures again.
"""

from __future__ import annotations

import argparse
import math
import re
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

import rlx.models.load  # noqa: F401  declares the families
from rlx.cli.parity import Difference
from rlx.models.family import FAMILIES, Family

Array = np.ndarray[Any, Any]
PAGE = Path(__file__).parents[2] / "docs" / "models.md"
LENGTH = 60  # tokens
EMBEDDER = "-embedding"
START, END = "<!-- families -->\n", "<!-- end of families -->\n"
HEAD = (
    "| family | reads and gives | `model_type` | GGUF | prefill | decode | KL | top-1 |\n"
    "| --- | --- | --- | --- | ---: | ---: | ---: | ---: |\n"
)
KINDS = {"decoder": "tokens, logits", "encoder": "tokens, vectors", "vision model": "images, vectors"}


@dataclass(frozen=True)
class Row:
    """What was measured of one family."""

    family: str
    prefill: Difference
    decode: Difference | None = None

    def text(self) -> str:
        family = FAMILIES[self.family]
        measured = [_shown(self.prefill.largest), _shown(self.decode.largest) if self.decode else ""]
        if self.prefill.divergence is not None and self.prefill.agreement is not None:
            measured += [_shown(max(self.prefill.divergence, 0.0)), f"{self.prefill.agreement:.0%}"]
        else:
            measured += ["", ""]
        return f"| {' | '.join([*known(family), *measured])} |\n"


def known(family: Family) -> list[str]:
    """What the register says of a family."""
    named = [", ".join(f"`{name}`" for name in names) for names in (family.hf, family.gguf)]
    if family.name.endswith(EMBEDDER):
        base = FAMILIES[family.name.removesuffix(EMBEDDER)]
        named = [f"`{base.hf[0]}` with `modules.json`", f"`{base.gguf[0]}` with a pooling type" if base.gguf else ""]
    return [f"`{family.name}`", KINDS[family.kind], *named]


def _shown(value: float) -> str:
    """Rounded up to one digit, so that it stays true on another machine of the kind."""
    if value < 1e-9:
        return "0"
    power = math.floor(math.log10(value))
    return f"{math.ceil(value / 10**power - 1e-9) * 10.0**power:.0e}"


# -- measuring -------------------------------------------------------------------------------------------------------
def configs() -> dict[str, tuple[str, str, dict[str, Any]]]:
    """Family -> kind, the name of its classes in transformers, and settings of a small one."""
    import golden_encoders
    import make_golden

    table: dict[str, tuple[str, str, dict[str, Any]]] = {}
    decoders = {name: (kind, make_golden.SIZES | said) for name, (kind, said) in make_golden.GOLDEN.items()}
    for name, (kind, said) in decoders.items():
        family = name.replace("3_5", "3.5").replace("_", "")
        table[family] = ("decoder", kind, said)
    for name, (kind, said) in golden_encoders.MODELS.items():
        family = name.replace("_", "-")
        if family in FAMILIES:
            table[family] = (FAMILIES[family].kind, kind, said)
    for family in FAMILIES:
        base = family.removesuffix(EMBEDDER)
        if family.endswith(EMBEDDER) and base in table:
            table[family] = ("embedder", *table[base][1:])
    return table


def measure(name: str, folder: Path) -> Row:
    kind, classes, settings = configs()[name]
    if kind == "decoder":
        return _decoder(name, classes, settings, folder)
    if kind == "embedder":
        return _embedder(name, classes, settings, folder)
    return _encoder(name, classes, settings, folder)


def _decoder(name: str, classes: str, settings: dict[str, Any], folder: Path) -> Row:
    import reference_models
    from small_llama import Driver

    from rlx.models.load import open_checkpoint

    model = reference_models.save(folder, classes, **settings)
    checkpoint = open_checkpoint(folder)
    assert checkpoint.family.name == name
    tokens = np.random.default_rng(2).integers(0, checkpoint.config.vocab, LENGTH).tolist()
    wanted = reference_models.logits(model, tokens)
    context = settings["max_position_embeddings"]
    actual = (Driver.of(checkpoint, context=context).by_chunks(tokens, chunk) for chunk in (LENGTH, 1))
    prefill, decode = (Difference.of(logits, wanted, logits=True) for logits in actual)
    return Row(name, prefill, decode)


def _embedder(name: str, classes: str, settings: dict[str, Any], folder: Path) -> Row:
    import reference_models
    import torch

    model = reference_models.save(folder, classes, **settings)
    (folder / "modules.json").write_text("[]")
    tokens = np.random.default_rng(2).integers(0, settings["vocab_size"], LENGTH).tolist()
    with torch.no_grad():
        wanted = model.model(torch.tensor([tokens]), use_cache=False).last_hidden_state[0].numpy()
    return Row(name, Difference.of(_states(name, folder, {"tokens": tokens}), wanted, logits=False))


def _encoder(name: str, classes: str, settings: dict[str, Any], folder: Path) -> Row:
    import reference_encoders
    import torch

    model = reference_encoders.save(folder, classes, **settings)
    rng = np.random.default_rng(2)
    with torch.no_grad():
        if "image_size" in settings:
            size = settings["image_size"]
            pixels = rng.standard_normal((1, 3, size, size)).astype(np.float32)
            wanted = model(torch.from_numpy(pixels)).last_hidden_state[0].numpy()
            actual = _states(name, folder, {"pixels": pixels})
        else:
            tokens = rng.integers(4, settings["vocab_size"], settings["max_position_embeddings"] - 2).tolist()
            wanted = model(torch.tensor([tokens])).last_hidden_state[0].numpy()
            actual = _states(name, folder, {"tokens": tokens})
    return Row(name, Difference.of(actual, wanted, logits=False))


def _states(name: str, folder: Path, arrays: dict[str, Any]) -> Array:
    """The hidden states of one text or image."""
    from rlx.models.load import open_checkpoint

    checkpoint = open_checkpoint(folder)
    assert checkpoint.family.name == name
    compiled = checkpoint.family.flow(checkpoint.config).build(checkpoint.weights).compile()
    if "pixels" in arrays:
        return compiled.run(checkpoint.config.inputs(arrays["pixels"]))[1][0]
    tokens = np.array([arrays["tokens"]], np.int32)
    inputs = {
        "tokens": tokens, "token_types": np.zeros_like(tokens), "attention_mask": np.ones(tokens.shape, np.float32),
        "positions": np.arange(tokens.size, dtype=np.int32)[None],
    }  # fmt: skip
    return compiled.run({n: inputs[n] for n in compiled.input_types})[0][0]


# -- the page --------------------------------------------------------------------------------------------------------
def rows_of(page: str) -> dict[str, list[str]]:
    """The cells of the table by family."""
    table = page.split(START)[1].split(END)[0].splitlines()[2:]
    cells = [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in table]
    return {row[0].strip("`"): row for row in cells}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--update", action="store_true", help="write docs/models.md")
    update = parser.parse_args().update
    lines = []
    for name in sorted(FAMILIES):
        with tempfile.TemporaryDirectory() as folder:
            lines.append(measure(name, Path(folder)).text())
        print(lines[-1], end="", flush=True)
    if update:
        page = PAGE.read_text()
        before, rest = page.split(START)
        PAGE.write_text(before + START + HEAD + "".join(lines) + END + rest.split(END)[1])


if __name__ == "__main__":
    sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
    main()
