"""The classes for Ray Data are plain callables: they work without a cluster, and without Ray."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import rlx
from batch.conftest import texts
from rlx.errors import RequestError


def test_an_embedder_adds_a_column(encoder: Path) -> None:
    listed = texts(5)
    embedder = rlx.ray.Embedder(str(encoder), column="body", output="v", threads=1)
    batch = {"body": np.array(listed, object), "id": np.arange(5)}
    result = embedder(batch)
    assert list(result) == ["body", "id", "v"] and result["v"].tobytes() == embedder.model.embed(listed).tobytes()
    with pytest.raises(RequestError, match="no column is called 'body', there are text"):
        embedder({"text": batch["body"]})


def test_a_generator_continues_or_answers(decoder: Path) -> None:
    prompts = ["hello", "a longer prompt", "hello"]
    batch = {"prompt": np.array(prompts, object)}
    generator = rlx.ray.Generator(str(decoder), max_tokens=6, threads=1)
    model = generator.model
    assert generator(batch)["completion"].tolist() == [model.generate(p, max_tokens=6).text for p in prompts]
    chat = rlx.ray.Generator(str(decoder), chat=True, system="be brief", max_tokens=6, threads=1)
    expected = [model.chat(p, system="be brief", max_tokens=6).text for p in prompts]
    assert chat(batch)["completion"].tolist() == expected
    sampled = rlx.ray.Generator(str(decoder), max_tokens=6, threads=1, sampling={"temperature": 1.0})
    first = sampled(batch)["completion"].tolist()
    alone = sampled({"prompt": np.array(prompts[1:2], object)})["completion"].tolist()
    assert first[0] == first[2] and alone == first[1:2], "a text depends on its prompt, not on its neighbours"
    with pytest.raises(RequestError, match="9000 tokens, the context holds 1024"):
        generator({"prompt": np.array(["x" * 9000], object)})
