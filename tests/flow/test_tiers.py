"""Changing real models: a profile beside the file (tier 1), stages of one's own in the flow (tier 2)."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tiny_llama

import rlx
from rlx.engine.language_model import LanguageModel
from rlx.errors import FormatError, GraphError, RequestError
from rlx.flow import Emit, FlowStage, FlowValue, ModelFlow, SideOutputs
from rlx.flow.stages import Custom, LlamaDecoder, RmsNorm, Sequence

Array = np.ndarray[Any, Any]
PROMPT = "Once upon a time"
TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]


def load(path: Path, **settings: Any) -> LanguageModel:
    model = rlx.load(path, **settings)
    assert isinstance(model, LanguageModel)
    return model


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Array]]:
    """A small random Llama and its weights."""
    folder = tmp_path_factory.mktemp("tiny")
    return folder, tiny_llama.write(folder)


# -- tier 1 ----------------------------------------------------------------------------------------------------------
@pytest.fixture
def stories_copy(stories: Path, tmp_path: Path) -> Path:
    for name in ("stories260K.bin", "tok512.bin"):
        shutil.copy(stories / name, tmp_path)
    return tmp_path


def test_a_profile_next_to_a_model_is_honoured(stories: Path, stories_copy: Path) -> None:
    told = (stories / "expected_greedy_200tok.txt").read_text()
    plain = load(stories / "stories260K.bin")
    (stories_copy / "profile.toml").write_text("[fusion]\nskip = true\n")
    model = load(stories_copy / "stories260K.bin")
    assert model.profile.fusion.skip and not plain.profile.fusion.skip
    assert len(model.compiled.report().launches) > 1.5 * len(plain.compiled.report().launches)
    assert (PROMPT + str(model.generate(PROMPT, max_tokens=60)))[:150] in told
    assert model.fingerprint(0) != plain.fingerprint(0)


def test_a_profile_may_round_what_a_model_computes(stories: Path, stories_copy: Path) -> None:
    plain = load(stories / "stories260K.bin").logits(PROMPT)
    (stories_copy / "profile.toml").write_text('[precision]\ncompute = "bf16"\nmixed = "auto"\n')
    rounded = load(stories_copy / "stories260K.bin")
    away = np.abs(rounded.logits(PROMPT) - plain).max() / np.abs(plain).max()
    assert 1e-4 < away < 0.1  # bf16 has 8 bits
    assert str(rounded.generate(PROMPT, max_tokens=8)) == ", there was a little girl"


def test_what_is_asked_for_wins_over_the_file(stories_copy: Path) -> None:
    (stories_copy / "profile.toml").write_text("[fusion]\nskip = true\n")
    path = stories_copy / "stories260K.bin"
    other = stories_copy / "other.toml"
    other.write_text('[fusion]\npolicy = "fusable"\n')
    assert load(path, profile="prefill").profile.fusion == rlx.CompileProfile.prefill().fusion
    for profile in (rlx.CompileProfile.decode(), other, str(other)):
        assert load(path, profile=profile).profile.fusion == rlx.CompileProfile.decode().fusion


def test_a_broken_profile_is_an_error_that_names_the_file(stories_copy: Path) -> None:
    (stories_copy / "profile.toml").write_text("[fusion]\nskipp = true\n")
    with pytest.raises(FormatError, match=r"profile\.toml: \[fusion\] has no key 'skipp'"):
        load(stories_copy / "stories260K.bin")


def test_a_folder_has_its_profile_inside(tmp_path: Path) -> None:
    tiny_llama.write(tmp_path)
    (tmp_path / "profile.toml").write_text('[fusion]\npolicy = "fusable"\n')
    assert load(tmp_path).profile.fusion == rlx.CompileProfile.decode().fusion


# -- tier 2 ----------------------------------------------------------------------------------------------------------
def test_a_cap_on_the_logits_of_a_real_model(stories: Path) -> None:
    path = stories / "stories260K.bin"
    plain, capped = load(path), load(path, patch=lambda flow: flow.logit_softcap(2.0))
    wanted = 2 * np.tanh(plain.logits(PROMPT).astype(np.float64) / 2)
    assert np.abs(capped.logits(PROMPT) - wanted).max() < 1e-6
    # tanh keeps the order, so that the likeliest token stays what it was
    assert str(capped.generate(PROMPT, max_tokens=20)) == str(plain.generate(PROMPT, max_tokens=20))
    likely = capped.generate(PROMPT, max_tokens=1, logprobs=1).logprobs
    assert likely is not None and likely[0].logprob < -1.0  # but less likely than it was


def test_a_residual_is_seen_through_a_stage_of_ones_own(tiny: tuple[Path, dict[str, Array]]) -> None:
    folder, weights = tiny
    side = SideOutputs()

    def tapped(stage: FlowStage) -> FlowStage:
        return Sequence([stage, Custom(lambda emit, value: side.push(value, "after_0"), "tap")])

    model = load(folder, patch=lambda flow: flow.edit("layers.0", tapped).with_extra_outputs(side))
    result, wanted = model.run(TOKENS), tiny_llama.forward(weights, TOKENS)
    assert list(result) == ["logits", "after_0"]
    for name, path in (("after_0", "layers.0"), ("logits", "logits")):
        assert np.abs(result[name] - wanted[path]).max() / np.abs(wanted[path]).max() < 2e-5
    assert model.generate(TOKENS, max_tokens=6).tokens == load(folder).generate(TOKENS, max_tokens=6).tokens
    assert list(model.run(TOKENS, capture="norm")) == ["norm"]  # built again, with its own side outputs


def test_what_a_tap_computes_is_not_the_value_of_its_layer(tiny: tuple[Path, dict[str, Array]]) -> None:
    folder, weights = tiny
    side = SideOutputs()

    def tapped(stage: FlowStage) -> FlowStage:
        return Sequence([stage, Custom(lambda emit, value: side.push(value * 3.0, "three"), "tap")])

    model = load(folder, patch=lambda flow: flow.edit("layers.0", tapped).with_extra_outputs(side))
    wanted = tiny_llama.forward(weights, TOKENS)
    captured = model.run(TOKENS, capture=["layers.0", "three"])
    largest = np.abs(wanted["layers.0"]).max()
    assert np.abs(captured["layers.0"] - wanted["layers.0"]).max() / largest < 2e-5
    assert np.abs(captured["three"] - 3 * wanted["layers.0"]).max() / largest < 6e-5
    changed = model.run(TOKENS, edit={"layers.0": lambda value: value * 0.0})
    assert not changed["three"].any() and np.abs(changed["logits"] - wanted["logits"]).max() > 1e-2


def test_a_stage_is_replaced_and_the_text_changes(tiny: tuple[Path, dict[str, Array]]) -> None:
    folder, weights = tiny
    half = "model.layers.1.mlp.down_proj.weight"

    def quieter(stage: FlowStage) -> FlowStage:
        assert isinstance(stage, LlamaDecoder)

        def emit(e: Emit, value: FlowValue) -> rlx.Value:
            after = e.stage(stage, value)
            assert after is not None
            return value.id + (after.id - value.id) * 0.5

        return Custom(emit, "half")

    model = load(folder, patch=lambda flow: flow.edit("layers.1", quieter))
    plain = tiny_llama.forward(weights, TOKENS)
    x = (plain["layers.0"] + plain["layers.1"]) / 2
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weights["model.norm.weight"]
    wanted = x @ weights["lm_head.weight"].astype(np.float64).T
    assert np.abs(model.logits(TOKENS) - wanted).max() / np.abs(wanted).max() < 2e-5
    before = model.generate(TOKENS, max_tokens=5)
    assert before.tokens[0] == wanted[-1].argmax() and ", patched, " in before.fingerprint
    assert half in model.built.params


def test_norms_by_a_plugin_of_ones_own(tiny: tuple[Path, dict[str, Array]]) -> None:
    """The final norm in another way: by hand, with a weight that is loaded and one that is made."""
    folder, weights = tiny

    class Norm(FlowStage):
        def emit(self, ctx: rlx.FlowCtx, value: FlowValue | None) -> FlowValue:
            x = ctx.need(value, "Norm")
            one = ctx.synth_param("one", np.float32(1.0))
            scale = one / ((x * x).mean(axis=-1, keepdims=True) + 1e-5).sqrt()
            return ctx.wrap(x * scale * ctx.load_param("model.norm.weight"), x.shape)

    replaced: list[FlowStage] = []

    def swap(stage: FlowStage) -> FlowStage:
        replaced.append(stage)
        return Norm()

    model = load(folder, patch=lambda flow: flow.edit("norm", swap))
    wanted = tiny_llama.forward(weights, TOKENS)["logits"]
    assert np.abs(model.logits(TOKENS) - wanted).max() / np.abs(wanted).max() < 2e-5
    assert all(isinstance(stage, RmsNorm) for stage in replaced)


def test_layers_are_left_out(tiny: tuple[Path, dict[str, Array]]) -> None:
    folder, weights = tiny
    model = load(folder, patch=lambda flow: flow.edit("layers.1", lambda stage: None))
    wanted = tiny_llama.forward(weights, TOKENS, num_hidden_layers=1)["logits"]
    assert np.abs(model.logits(TOKENS) - wanted).max() / np.abs(wanted).max() < 2e-5


def test_a_patch_must_give_a_flow(tiny: tuple[Path, dict[str, Array]]) -> None:
    with pytest.raises(GraphError, match="a patch returned a NoneType, expected a flow"):
        load(tiny[0], patch=lambda flow: None)


def test_a_setting_that_is_nearly_profile_is_named(tiny: tuple[Path, dict[str, Array]]) -> None:
    with pytest.raises(RequestError, match="no setting is called 'profil'") as caught:
        load(tiny[0], profil="decode")
    assert "'profile'" in (caught.value.hint or "")


def test_a_recipe_of_a_family_builds_what_load_builds(tiny: tuple[Path, dict[str, Array]]) -> None:
    model = load(tiny[0])
    checkpoint = model.checkpoint
    recipe = rlx.ModelRecipe("llama", model.family.flow)
    built = recipe.build(checkpoint.weights, checkpoint.config, model.context, None)
    assert isinstance(recipe.assemble(checkpoint.config, model.context, None), ModelFlow)
    assert built.module == model.flow.build(checkpoint.weights).module


@pytest.mark.large
def test_smollm2_with_a_cap_and_a_tap(monkeypatch: pytest.MonkeyPatch) -> None:
    from rlx.errors import NotFoundError

    side = SideOutputs()

    def patch(flow: ModelFlow) -> ModelFlow:
        tapped = lambda stage: Sequence([stage, Custom(lambda emit, value: side.push(value, "middle"))])
        return flow.edit("layers.15", tapped).logit_softcap(30.0).with_extra_outputs(side)

    try:
        plain = rlx.load("smollm2-135m", offline=True, context=512)
    except NotFoundError:
        pytest.skip("smollm2-135m is absent: rlx pull smollm2-135m")
    assert isinstance(plain, LanguageModel)
    patched = rlx.load("smollm2-135m", offline=True, context=512, patch=patch)
    assert isinstance(patched, LanguageModel)
    text = "The capital of France is"
    result, wanted = patched.run(text), plain.run(text, capture=["layers.15", "logits"])
    assert result["middle"].tobytes() == wanted["layers.15"].tobytes()
    assert np.abs(result["logits"] - 30 * np.tanh(wanted["logits"].astype(np.float64) / 30)).max() < 1e-4
    answer = str(patched.generate(text, max_tokens=12, temperature=0.0))
    assert answer == str(plain.generate(text, max_tokens=12, temperature=0.0)) and "Paris" in answer
