"""`docs/adding-a-model.md`: the MPNet that it adds is that of `transformers`. `test_docs.py` runs the page itself."""

from __future__ import annotations

import contextlib
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from golden_encoders import FOLDER, LENGTHS, batch, write_folder

import rlx
from rlx.models.load import open_checkpoint

PAGE = (Path(__file__).parent.parent / "docs" / "adding-a-model.md").read_text()
CONFIGS: list[dict[str, Any]] = [
    {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 6, "intermediate_size": 80},
    {"hidden_size": 60, "num_hidden_layers": 1, "num_attention_heads": 3, "intermediate_size": 33},
    {"hidden_size": 35, "num_hidden_layers": 3, "num_attention_heads": 5, "intermediate_size": 20},
]  # fmt: skip


def run(block: str, scope: dict[str, Any]) -> None:
    """As in a file of its own, which imports nothing from the future."""
    exec(compile(block, "adding-a-model.md", "exec", dont_inherit=True), scope)


@pytest.fixture
def page(
    own_families: None, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> Iterator[dict[str, Any]]:
    """What the blocks of the page define."""
    monkeypatch.chdir(tmp_path_factory.mktemp("page"))
    scope: dict[str, Any] = {}
    with contextlib.redirect_stdout(io.StringIO()):
        for block in re.findall(r"```python\n(.*?)```", PAGE, re.S):
            run(block, scope)
    yield scope


def test_the_family_of_the_page_gives_what_transformers_gave(page: dict[str, Any], tmp_path: Path) -> None:
    golden = json.loads((FOLDER / "mpnet.json").read_text())
    write_folder(tmp_path, golden)
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.family.name == "mpnet"
    f = checkpoint.family.flow(checkpoint.config).build(checkpoint.weights).compile()
    inputs = batch()
    (actual,) = f.run({name: inputs[name] for name in f.input_types})
    for row, length, wanted in zip(actual, LENGTHS, golden["states"], strict=True):
        assert np.abs(row[:length] - wanted).max() / np.abs(wanted).max() < 2e-4


@pytest.mark.parity
def test_the_proof_of_the_page_holds(page: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (proof,) = re.findall(r"```py\n(.*?)```", PAGE, re.S)
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        run(proof, page)
    assert printed.getvalue() == "True\n"


@pytest.mark.parity
@pytest.mark.parametrize("config", CONFIGS)
def test_random_models_equal_transformers(page: dict[str, Any], tmp_path: Path, config: dict[str, Any]) -> None:
    from reference_encoders import check, save

    sizes: dict[str, Any] = {"vocab_size": 64, "max_position_embeddings": 280}
    check(tmp_path, save(tmp_path, "MPNet", **sizes, **config), length=275, avoid=1)


@pytest.mark.parity
def test_buckets_are_those_of_transformers_at_every_distance(page: dict[str, Any]) -> None:
    import torch
    from transformers.models.mpnet.modeling_mpnet import MPNetEncoder

    apart = torch.arange(1 - 512, 512)
    assert np.array_equal(page["buckets"](512), MPNetEncoder.relative_position_bucket(apart).numpy())


def test_a_loaded_model_embeds(page: dict[str, Any], tmp_path: Path) -> None:
    import small_bert

    golden = json.loads((FOLDER / "mpnet.json").read_text())
    golden["config"]["vocab_size"] = golden["shapes"]["embeddings.word_embeddings.weight"][0] = len(small_bert.VOCAB)
    write_folder(tmp_path, golden)
    small_bert.write_tokenizer(tmp_path)
    model = rlx.load(tmp_path)
    assert isinstance(model, rlx.EmbeddingModel)
    texts = ["bal bam ban", "dal", " ".join(small_bert.WORDS[:20])]
    rows = model.embed(texts)
    assert rows.shape == (3, 24) and all(np.array_equal(model.embed(t), r) for t, r in zip(texts, rows, strict=True))


def test_the_page_is_short_and_asks_for_no_change_of_rlx() -> None:
    code = "".join(re.findall(r"```python\n(.*?)```", PAGE.split("## 6.")[0], re.S))
    assert len([line for line in code.splitlines() if line.strip()]) < 130
