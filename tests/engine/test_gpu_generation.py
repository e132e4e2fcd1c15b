"""Generation on a GPU: the CPU's tokens in f32, bf16 within bounds, no wait per step, memory that does not suffice."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import rlx
from rlx.backends.base import backend, device
from rlx.cli.verify import divergence_of
from rlx.engine.language_model import LanguageModel
from rlx.errors import CapabilityError, ResourceError

from .conftest import STORIES, language_model

pytestmark = pytest.mark.gpu
TEXT = "Once upon a time"
DIVERGENCE, CHOICES = 0.01, 0.95  # of bf16 on stories: mean KL in nats, share of equal likeliest tokens


@pytest.fixture
def story() -> Path:
    if not STORIES.exists():
        pytest.skip(f"{STORIES} is absent")
    return STORIES


def test_200_greedy_tokens_are_those_of_the_cpu(story: Path) -> None:
    on_cpu, on_gpu = (language_model(story, device=name).generate(TEXT, max_tokens=200) for name in ("cpu", "cuda"))
    assert len(on_cpu.tokens) == 200 and on_gpu.tokens == on_cpu.tokens
    assert "sm_" in on_gpu.fingerprint and on_gpu.fingerprint != on_cpu.fingerprint


def test_sampled_tokens_are_those_of_the_cpu(story: Path) -> None:
    """The same random numbers; logits differ in the last places, which rarely changes a choice."""
    settings = {"max_tokens": 60, "temperature": 0.8, "top_p": 0.9, "seed": 7}
    on_cpu, on_gpu = (language_model(story, device=name).generate(TEXT, **settings) for name in ("cpu", "cuda"))  # type: ignore[arg-type]
    assert on_gpu.tokens[:20] == on_cpu.tokens[:20]


def test_bf16_is_near_f32(story: Path, tmp_path: Path) -> None:
    wide = language_model(story)
    tokens = wide.generate(TEXT, max_tokens=200).tokens
    wide.save(tmp_path / "bf16", dtype="bf16")
    narrow = language_model(tmp_path / "bf16", device="cuda")
    divergence, alike = divergence_of(wide.logits(tokens), narrow.logits(tokens))
    print(f"KL {divergence:.2e}, same choice at {alike:.1%} of {len(tokens)} tokens")
    assert divergence < DIVERGENCE and alike > CHOICES


def test_bits_do_not_depend_on_the_batch_the_chunks_or_the_prefix_cache(story: Path) -> None:
    model = language_model(story, device="cuda")
    prompts = [TEXT, f"{TEXT} there was a little girl named Lily. She", "The dog"]
    together = model.generate(prompts, max_tokens=40, logprobs=1)
    for prompt, completion in zip(prompts, together, strict=True):
        cached = model.generate(prompt, max_tokens=40, logprobs=1)
        model.caches.clear()
        alone = model.generate(prompt, max_tokens=40, logprobs=1)
        assert cached.logprobs == alone.logprobs == completion.logprobs


def test_a_step_is_started_before_the_one_before_it_is_read(story: Path) -> None:
    model = language_model(story, device="cuda")
    model.generate(TEXT, max_tokens=8)
    executable, gpu = model.compiled.executable, model.compiled.executable.gpu  # type: ignore[attr-defined]
    order: list[str] = []
    enqueue, wait, synchronize = executable.enqueue, gpu.wait, gpu.synchronize
    executable.enqueue = lambda *a: (order.append("step"), enqueue(*a))[1]  # type: ignore[method-assign]
    gpu.wait = lambda event: (order.append("wait"), wait(event))[1]
    gpu.synchronize = lambda: (order.append("synchronize"), synchronize())[1]
    try:
        model.caches.clear()
        assert len(model.generate(TEXT, max_tokens=30).tokens) == 30
    finally:
        del executable.enqueue, gpu.wait, gpu.synchronize  # type: ignore[method-assign]
    assert order[order.index("step") :] == ["step", *["step", "wait"] * 28, "wait"]


def test_devices_by_number_and_automatically(story: Path) -> None:
    assert str(device("cuda:0")) == "cuda"
    count = backend("cuda").device_count()
    with pytest.raises(CapabilityError, match=rf"'cuda' has {count} device"):
        device(f"cuda:{count}")
    with rlx.load(story, device="auto") as model:
        assert isinstance(model, LanguageModel) and model.compiled.device == "cuda"


def test_memory_that_does_not_suffice_is_named() -> None:
    allocator = backend("cuda").allocator
    with pytest.raises(ResourceError, match=r"cuda:0: weight 'w' asks for [\d,]+ MiB, [\d,]+ MiB of [\d,]+ MiB are"):
        allocator.upload(np.broadcast_to(np.zeros(1, np.uint8), (1 << 50,)), "weight 'w'")
