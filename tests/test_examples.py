"""The examples, on tiny data: each result is compared with NumPy, with a formula or with what must come out."""

from __future__ import annotations

import builtins
import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import char_model
import chart
import chat
import new_model
import numpy as np
import pytest
import search
import small_bert
import small_llama
import steer
import throw
import tiny_llama

import rlx

Array = np.ndarray[Any, Any]
SVG = "{http://www.w3.org/2000/svg}"
BOS, EOS = "<s>", "</s>"
TEMPLATE = "{{ bos_token }}{% for m in messages %}{{ m.role[0] }}:{{ m.content }}\n{% endfor %}a:"


@pytest.fixture(scope="module")
def talker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random Llama with a chat template, whose tokens are single characters."""
    from tokenizers import AddedToken, Tokenizer
    from tokenizers.decoders import Fuse
    from tokenizers.models import BPE

    folder = tmp_path_factory.mktemp("talker")
    tiny_llama.write(folder)
    letters = ["\n", *(chr(code) for code in range(32, 126))]
    tokenizer = Tokenizer(BPE({letter: i for i, letter in enumerate([*letters, BOS, EOS])}, []))
    tokenizer.add_special_tokens([AddedToken(BOS, special=True), AddedToken(EOS, special=True)])
    tokenizer.decoder = Fuse()
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": BOS, "eos_token": EOS, "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))
    return folder


def typed(monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    """What the user types, then Ctrl-D."""
    waiting = iter(lines)

    def read(prompt: str) -> str:
        for line in waiting:
            return line
        raise EOFError

    monkeypatch.setattr(builtins, "input", read)


# -- chat.py ----------------------------------------------------------------------------------------------------------
def test_the_chat_bot_answers_with_the_whole_conversation_in_mind(
    talker: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed(monkeypatch, "Hello", "And now?")
    said = chat.main([str(talker), "--system", "Be kind.", "--max-tokens", "8", "--usage"])
    assert [m["role"] for m in said] == ["system", "user", "assistant", "user", "assistant"]
    model = rlx.load(talker)
    for end in (2, 4):
        assert said[end]["content"] == str(model.chat(said[:end], max_tokens=8, temperature=0))
    alone = str(model.chat("And now?", max_tokens=8, temperature=0))
    assert said[4]["content"] != alone, "the answer depends on what was said before"
    printed = capsys.readouterr().out
    assert f"{said[2]['content']}\n[prompt: 22 tokens, 0 cached; answer: 8 tokens]\n" in printed
    assert "[prompt: 44 tokens, 29 cached; answer: 8 tokens]\n" in printed  # all but the last token of the first turn


def test_the_chat_bot_stops_where_it_is_told(
    talker: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    full = str(rlx.load(talker).chat("Hello", max_tokens=12, temperature=0))
    typed(monkeypatch, "Hello")
    said = chat.main([str(talker), "--max-tokens", "12", "--stop", full[5:7]])
    assert said[1]["content"] == full[: full.index(full[5:7])]


def test_ctrl_c_ends_an_answer_and_keeps_what_was_said(
    talker: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    plain, pieces = builtins.print, []

    def interrupted(*args: Any, **options: Any) -> None:
        plain(*args, **options)
        pieces.extend(args)
        if len(pieces) == 3:
            raise KeyboardInterrupt

    typed(monkeypatch, "Hello")
    monkeypatch.setattr(builtins, "print", interrupted)
    said = chat.main([str(talker), "--max-tokens", "50"])
    monkeypatch.undo()
    assert said[1]["content"] == "".join(pieces[:3])
    assert "[stopped]" in capsys.readouterr().out


def test_a_question_that_does_not_fit_is_refused_and_the_chat_goes_on(
    talker: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    typed(monkeypatch, "Hello", "long " * 100, "Still there?")
    said = chat.main([str(talker), "--max-tokens", "4"])
    assert [m["content"] for m in said if m["role"] == "user"] == ["Hello", "Still there?"]
    assert "the context holds 256" in capsys.readouterr().out


def test_a_model_without_a_chat_template_is_refused(
    talker: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = Path(shutil.copytree(talker, tmp_path / "base"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": BOS, "eos_token": EOS}))
    with pytest.raises(SystemExit):
        chat.main([str(folder)])
    assert "has no chat template" in capsys.readouterr().err


def test_old_turns_are_forgotten_when_the_context_is_full(talker: Path) -> None:
    model = rlx.load(talker, context=64)
    turns = [{"role": role, "content": f"number {i}"} for i in range(4) for role in ("user", "assistant")]
    messages = [{"role": "system", "content": "S"}, *turns, {"role": "user", "content": "last"}]
    fitted = chat.fit(model, messages, room=10)
    assert fitted[0] == messages[0] and fitted[1]["role"] == "user" and fitted[-1]["content"] == "last"
    assert len(model.chat_tokens(fitted)) + 10 <= 64
    dropped = len(messages) - len(fitted)
    longer = [messages[0], *messages[dropped - 1 :]]
    assert len(model.chat_tokens(longer)) + 10 > 64, "no more is dropped than has to be"
    assert chat.fit(model, fitted, room=10) == fitted


# -- search.py --------------------------------------------------------------------------------------------------------
@pytest.fixture
def library(tmp_path: Path) -> Iterator[tuple[Path, dict[str, Array]]]:
    """A folder with texts, and the weights of the model in it."""
    weights = small_bert.write(tmp_path / "bert")
    folder = tmp_path / "texts"
    folder.mkdir()
    (folder / "a.txt").write_text("bal bam ban\n\n\nkos kus kas\nkal kem\n")
    (folder / "b.md").write_text("dal del dil\n\nfam fem fim fom fum\n")
    (folder / "c.bin").write_text("bal bam ban")
    yield folder, weights


def test_search_ranks_paragraphs_as_numpy_does(
    library: tuple[Path, dict[str, Array]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder, weights = library

    def vector(text: str) -> Array:
        mean = small_bert.pooled(small_bert.hidden_states(weights, small_bert.tokens_of(text)), "mean")
        return mean / np.linalg.norm(mean)

    question, model = "fam fem", str(folder.parent / "bert")
    best = search.main([question, str(folder), "--model", model, "--top", "9"])
    texts = {"bal bam ban": ("a.txt", 1), "kos kus kas\nkal kem": ("a.txt", 4)}
    texts |= {"dal del dil": ("b.md", 1), "fam fem fim fom fum": ("b.md", 3)}
    wanted = sorted(texts, key=lambda text: -vector(text) @ vector(question))
    assert [hit.text for hit in best] == wanted
    assert [hit.id for hit in best] == [f"{folder / name}:{line}" for name, line in (texts[text] for text in wanted)]
    np.testing.assert_allclose([hit.score for hit in best], [vector(t) @ vector(question) for t in wanted], atol=1e-5)
    assert f"{folder / 'a.txt'}:4\n      kos kus kas kal kem\n" in capsys.readouterr().out


def test_an_index_saves_embedding_paragraphs_again(
    library: tuple[Path, dict[str, Array]], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, _ = library
    words = ["dal del dil", str(folder), "--model", str(folder.parent / "bert"), "--index", str(folder / "index")]
    first = search.main(words)
    assert first[0].text == "dal del dil" and first[0].score == pytest.approx(1, abs=1e-6)
    (folder / "b.md").write_text("dal del dil\n\nbis bes\n")
    embedded: list[str] = []
    embed = rlx.EmbeddingModel.embed
    monkeypatch.setattr(
        rlx.EmbeddingModel, "embed", lambda self, texts, **more: (embedded.append(texts), embed(self, texts, **more))[1]
    )
    assert search.main(words)[0] == first[0]
    assert embedded == [["bis bes"], ["dal del dil"]]  # the new paragraph, and the question
    with rlx.Index.open(folder / "index") as index:
        assert index.texts() == ["bal bam ban", "kos kus kas\nkal kem", "dal del dil", "bis bes"]


# -- steer.py ---------------------------------------------------------------------------------------------------------
def test_steering_adds_the_difference_of_two_prompts(talker: Path, tmp_path: Path) -> None:
    weights = tiny_llama.write(tmp_path / "again")
    model = rlx.load(talker)
    ids = {text: model.tokenizer.encode(text) for text in ("I love", "I hate", "It was")}
    after = {text: tiny_llama.forward(weights, ids[text])["layers.1"][-1] for text in ("I love", "I hate")}
    direction = after["I love"] - after["I hate"]
    picture = tmp_path / "odds.svg"
    odds = steer.main([
        "It was", "--model", str(talker), "--towards", "I love", "--away", "I hate", "--words", "g", "b",
        "--tokens", "4", "--strengths", "-1", "0", "0.5", "--plot", str(picture),
    ])  # fmt: skip
    for strength, actual in odds.items():
        add = lambda x, s=strength: x + s * direction
        logits = tiny_llama.forward(weights, ids["It was"], after={1: add})["logits"][-1]
        first, second = (model.tokenizer.encode(letter)[0] for letter in "gb")
        assert actual == pytest.approx(logits[first] - logits[second], abs=2e-3)
    assert len(set(odds.values())) == 3
    assert picture.read_text().count("<polyline") == 1


def test_a_steered_model_writes_what_edits_predict(talker: Path) -> None:
    model = rlx.load(talker)
    path, direction = steer.difference(model, "I love", "I hate", layer=0)
    assert path == "layers.0"
    completion = model.generate("It was", max_tokens=5, edit={path: lambda value: value + direction})
    text = "It was"
    for token in completion.tokens:
        logits = model.run(text, edit={path: lambda value: value + direction})["logits"]
        assert logits[-1].argmax() == token
        text += model.tokenizer.decode([token])
    assert str(completion) != str(model.generate("It was", max_tokens=5, temperature=0))


# -- new_model.py -----------------------------------------------------------------------------------------------------
def test_a_new_decoder_computes_what_a_llama_does() -> None:
    flow = new_model.decoder(9)
    weights = {name: value * 5 if value.ndim == 2 else value for name, value in flow.init(rlx.random.key(1)).items()}
    names = {"embed": "model.embed_tokens.weight", "norm": "model.norm.weight", "head": "lm_head.weight"}
    for i in range(new_model.LAYERS):
        own, theirs = f"layers.{i}", f"model.layers.{i}"
        names |= {f"{own}.attention.{n}_proj.weight": f"{theirs}.self_attn.{n}_proj.weight" for n in "qkvo"}
        names |= {f"{own}.mlp.{n}": f"{theirs}.mlp.{n}_proj.weight" for n in ("gate", "up", "down")}
        names[f"{own}.attention.norm"] = f"{theirs}.input_layernorm.weight"
        names[f"{own}.mlp.norm"] = f"{theirs}.post_attention_layernorm.weight"
    config = small_llama.SETTINGS | {
        "hidden_size": new_model.DIM, "num_hidden_layers": new_model.LAYERS, "num_attention_heads": new_model.HEADS,
        "num_key_value_heads": new_model.KV_HEADS,
    }  # fmt: skip
    tokens = np.random.default_rng(0).integers(0, new_model.VOCAB, 9).astype(np.int32)
    wanted = small_llama.forward(config, {names[name]: value for name, value in weights.items()}, tokens.tolist())
    (logits,) = flow.build(weights).compile().run({"tokens": tokens[None]})
    np.testing.assert_allclose(logits[0], wanted, atol=1e-4 * np.abs(wanted).max())


def test_a_new_decoder_learns_to_repeat(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert new_model.main(["--length", "6", "--steps", "120", "--plot", str(tmp_path / "loss.svg")]) > 0.95
    assert "step 120: loss 0." in capsys.readouterr().out
    assert len(points(tmp_path / "loss.svg")[0]) == 120


# -- throw.py ---------------------------------------------------------------------------------------------------------
def test_a_simulated_flight_and_its_slope_are_exact() -> None:
    np.testing.assert_allclose(throw.flight(0.4, 0.9), throw.exact_flight(0.4, 0.9), atol=1e-6)
    slope = rlx.grad(lambda drag: throw.flight(drag, 0.9)[-1, 0])(np.array(0.4))
    step = 1e-5
    ends = [throw.exact_flight(0.4 + s, 0.9)[-1, 0] for s in (-step, step)]
    assert slope == pytest.approx(throw.exact_slope(0.4, 0.9), rel=1e-6)
    assert slope == pytest.approx((ends[1] - ends[0]) / (2 * step), rel=1e-6)


def test_drag_and_angle_are_found(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    params = throw.main(["--drag", "0.5", "--angle", "40", "--plot", str(tmp_path / "throw.svg")])
    np.testing.assert_allclose(params, [0.5, np.radians(40)], rtol=1e-5)
    assert [len(p) for p in points(tmp_path / "throw.svg")] == [throw.STEPS] * 2
    assert (tmp_path / "throw.svg").read_text().count("<circle") == throw.STEPS
    noisy = throw.main(["--drag", "0.5", "--angle", "40", "--noise", "0.1"])
    np.testing.assert_allclose(noisy, [0.5, np.radians(40)], rtol=0.02)


# -- char_model.py ----------------------------------------------------------------------------------------------------
SMALL = ["--dim", "32", "--layers", "1", "--heads", "2", "--context", "16", "--batch", "8", "--write", "40"]


def test_a_character_model_learns_a_small_text(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    text = tmp_path / "text.txt"
    text.write_text("the cat sat on the mat. " * 20, "utf-8")
    losses = char_model.main([str(text), *SMALL, "--steps", "60", "--save", str(tmp_path / "model.safetensors"),
                              "--plot", str(tmp_path / "loss.svg")])  # fmt: skip
    assert len(losses) == 60 and losses[0] > 2.2  # 11 characters, equally likely at first
    assert losses[-1] < 1.0
    printed = capsys.readouterr().out
    assert "step    60: loss " in printed
    written = printed.splitlines()[-1]
    assert len(written) == 41 and set(written) <= set("the cat sat on the mat. ")
    assert (tmp_path / "model.safetensors").stat().st_size > 10_000
    assert [len(curve) for curve in points(tmp_path / "loss.svg")] == [60]


def test_a_missing_or_short_text_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        char_model.main([str(tmp_path / "none.txt")])
    assert "no such file: " in capsys.readouterr().err
    (tmp_path / "short.txt").write_text("short")
    with pytest.raises(SystemExit):
        char_model.main([str(tmp_path / "short.txt")])
    assert "has 5 characters, a context of 128 needs more" in capsys.readouterr().err


# -- chart.py ---------------------------------------------------------------------------------------------------------
def points(path: Path) -> list[list[tuple[float, float]]]:
    """The lines of a chart."""
    lines = ElementTree.parse(path).getroot().findall(f"{SVG}polyline")
    pairs = [[point.split(",") for point in line.attrib["points"].split()] for line in lines]
    return [[(float(x), float(y)) for x, y in line] for line in pairs]


def test_a_chart_has_its_points_where_its_ticks_say(tmp_path: Path) -> None:
    path = tmp_path / "chart.svg"
    chart.chart(path, "Title", {"a": [(0, 1.0), (4, 3.0)], "flat": [(0, 2.0), (4, 2.0)]})
    (line, flat) = points(path)
    assert line == [(chart.LEFT, chart.BOTTOM), (chart.RIGHT, chart.TOP)]
    assert flat[0][1] == flat[1][1] == (chart.BOTTOM + chart.TOP) / 2
    texts = {t.text: t.attrib for t in ElementTree.parse(path).getroot().findall(f"{SVG}text")}
    assert float(texts["2"]["y"]) == flat[0][1] + 4 or "2.5" in texts
    chart.chart(path, "One value", {"a": [(1, 5.0), (2, 5.0)]})
    assert "nan" not in path.read_text()
