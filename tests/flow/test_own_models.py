"""Models of one's own: a flow from scratch against torch, as a function, and as a model that generates."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import rlx
from rlx.errors import BindError, CapabilityError, GraphError, RequestError, RlxError
from rlx.flow import LayerStack, ModelFlow
from rlx.formats.tokenizer import Tokenizer

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.parity

VOCAB, DIM, LAYERS, HEADS, KV, FFN, EPS, CONTEXT = 61, 32, 2, 4, 2, 48, 1e-5, 64
f32, i32 = np.float32, np.int32
TOKENS = np.array([[3, 1, 4, 1, 5, 9, 2], [6, 5, 3, 5, 8, 9, 7]], i32)


def decoder(**attention: Any) -> ModelFlow:
    def layer(i: int) -> LayerStack:
        at = f"layers.{i}"
        stack = LayerStack().residual_save().rms_norm(f"{at}.norm1", EPS)
        stack = stack.attention(f"{at}.attn", HEADS, KV, **attention).dropout(0.1).residual_add()
        stack = stack.residual_save().rms_norm(f"{at}.norm2", EPS)
        return stack.swiglu(f"{at}.gate", f"{at}.up", f"{at}.down", intermediate_size=FFN).residual_add()

    flow = ModelFlow("mine").input("tokens", ("batch", "seq"), "i32").rope(CONTEXT, DIM // HEADS)
    flow = flow.embed("embed", shape=(VOCAB, DIM)).repeat_layers(LAYERS, layer)
    return flow.rms_norm("norm", EPS).lm_head(VOCAB, DIM, tied=True)


FLOW = decoder()
PARAMS = {k: v * 4 for k, v in FLOW.init(rlx.random.key(0)).items()}


# -- torch ------------------------------------------------------------------------------------------------------------
def torch_logits(p: dict[str, Any], tokens: np.ndarray, bias: bool = False) -> torch.Tensor:
    """The same decoder, written in torch."""
    w = {k: v if isinstance(v, torch.Tensor) else torch.tensor(np.asarray(v)) for k, v in p.items()}

    def norm(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return torch.nn.functional.rms_norm(x, (DIM,), weight, EPS)

    def rotate(x: torch.Tensor) -> torch.Tensor:  # [batch, heads, seq, head_dim]
        half = x.shape[-1] // 2
        frequencies = 10_000.0 ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.outer(torch.arange(x.shape[2], dtype=torch.float64), frequencies)
        cos, sin = angles.cos().to(x.dtype), angles.sin().to(x.dtype)
        a, b = x[..., :half], x[..., half:]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def heads(x: torch.Tensor, at: str, name: str, count: int) -> torch.Tensor:
        y = x @ w[f"{at}.{name}_proj.weight"].T
        y = y + w[f"{at}.{name}_proj.bias"] if bias else y
        return y.reshape(*x.shape[:2], count, -1).transpose(1, 2)

    x = w["embed"][torch.tensor(np.asarray(tokens), dtype=torch.long)]
    for i in range(LAYERS):
        at = f"layers.{i}.attn"
        y = norm(x, w[f"layers.{i}.norm1"])
        q, k = (rotate(heads(y, at, name, count)) for name, count in (("q", HEADS), ("k", KV)))
        v = heads(y, at, "v", KV)
        attended = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        out = attended.transpose(1, 2).reshape(*x.shape[:2], -1) @ w[f"{at}.o_proj.weight"].T
        x = x + (out + w[f"{at}.o_proj.bias"] if bias else out)
        y = norm(x, w[f"layers.{i}.norm2"])
        inner = torch.nn.functional.silu(y @ w[f"layers.{i}.gate"].T) * (y @ w[f"layers.{i}.up"].T)
        x = x + inner @ w[f"layers.{i}.down"].T
    return norm(x, w["norm"]) @ w["embed"].T


@pytest.mark.parametrize("bias", [False, True])
def test_a_decoder_from_scratch_is_that_of_torch(bias: bool) -> None:
    flow = decoder(bias=bias)
    params = {k: v * 4 + (0.1 if k.endswith("bias") else 0) for k, v in flow.init(rlx.random.key(1)).items()}
    (logits,) = flow.build(params).compile().run({"tokens": TOKENS})
    np.testing.assert_allclose(logits, torch_logits(params, TOKENS, bias).numpy(), rtol=2e-4, atol=2e-4)


def test_rope_tables_are_cosines_and_sines_of_the_angles() -> None:
    cos, sin = rlx.flow.rope_tables(5, 6, theta=100.0)
    angles = np.outer(np.arange(5), [1.0, 100.0 ** (-1 / 3), 100.0 ** (-2 / 3)])
    np.testing.assert_allclose(cos, np.cos(angles), atol=1e-7)
    np.testing.assert_allclose(sin, np.sin(angles), atol=1e-7)
    assert cos.dtype == sin.dtype == f32
    with pytest.raises(RlxError, match="head_dim is 5, RoPE rotates pairs"):
        rlx.flow.rope_tables(4, 5)


def test_attention_without_rope_and_mask_is_that_of_torch() -> None:
    """The plain encoder attention: eight heads of their own, all tokens see all."""
    flow = ModelFlow("encoder").input("x", ("batch", "seq", 16)).attention("a", 8, mask="none", rope=None, bias=True)
    params = {k: v * 20 for k, v in flow.init(rlx.random.key(0)).items()}
    params |= {k: v + 0.3 for k, v in params.items() if k.endswith("bias")}
    x = np.random.default_rng(0).normal(0, 1, (2, 5, 16)).astype(f32)
    theirs = torch.nn.MultiheadAttention(16, 8, batch_first=True)
    w = {k: torch.tensor(v) for k, v in params.items()}
    with torch.no_grad():
        theirs.in_proj_weight.copy_(torch.cat([w[f"a.{n}_proj.weight"] for n in "qkv"]))
        theirs.in_proj_bias.copy_(torch.cat([w[f"a.{n}_proj.bias"] for n in "qkv"]))
        theirs.out_proj.weight.copy_(w["a.o_proj.weight"])
        theirs.out_proj.bias.copy_(w["a.o_proj.bias"])
        wanted = theirs(*[torch.tensor(x)] * 3)[0].numpy()
    np.testing.assert_allclose(flow.build(params).compile().run({"x": x})[0], wanted, rtol=1e-4, atol=1e-5)


# -- as a function ----------------------------------------------------------------------------------------------------
def test_a_flow_as_a_function_computes_what_it_does_compiled() -> None:
    (wanted,) = FLOW.build(PARAMS).compile().run({"tokens": TOKENS})
    f = FLOW.as_function(PARAMS)
    for logits in (f(TOKENS), f(tokens=TOKENS), rlx.jit(f)(TOKENS), FLOW.build(PARAMS).as_function()(TOKENS)):
        np.testing.assert_allclose(logits, wanted, rtol=1e-5, atol=1e-5)
    one_by_one = rlx.vmap(lambda row: f(row[None])[0])(TOKENS)
    np.testing.assert_allclose(one_by_one, wanted, rtol=1e-5, atol=1e-5)


def loss(p: dict[str, Any], tokens: Any) -> Any:
    logits = FLOW.as_function(p)(tokens)
    return rlx.cross_entropy(logits[:, :-1], tokens[:, 1:]).mean()


def test_gradients_of_the_weights_are_those_of_torch() -> None:
    w = {k: torch.tensor(v, requires_grad=True) for k, v in PARAMS.items()}
    logits = torch_logits(w, TOKENS)
    wanted = torch.nn.functional.cross_entropy(
        logits[:, :-1].reshape(-1, VOCAB), torch.tensor(TOKENS[:, 1:].reshape(-1), dtype=torch.long)
    )
    wanted.backward()
    value, grads = rlx.value_and_grad(loss)(PARAMS, TOKENS)
    assert value == pytest.approx(wanted.item(), rel=1e-5)
    assert set(grads) == set(PARAMS)
    for name, grad in grads.items():
        np.testing.assert_allclose(grad, w[name].grad.numpy(), rtol=1e-3, atol=1e-5, err_msg=name)
    each = rlx.jit(rlx.vmap(rlx.grad(loss), in_axes=(None, 0)))(PARAMS, TOKENS[:, None])
    for name, grad in grads.items():  # per-example gradients: their mean is that of the batch
        np.testing.assert_allclose(each[name].mean(axis=0), grad, rtol=1e-3, atol=1e-5, err_msg=name)


def test_gradients_and_tangents_of_inputs() -> None:
    flow = ModelFlow("mlp").input("x", ("n", 4)).linear("w", out=3).custom(lambda emit, v: np.tanh(v))
    params, x = flow.init(rlx.random.key(0)), np.random.default_rng(0).normal(0, 1, (2, 4)).astype(f32)
    w = params["w"].astype(np.float64)
    f = flow.as_function(params)
    slope = 1 - np.tanh(x @ w.T) ** 2
    np.testing.assert_allclose(rlx.grad(lambda x: f(x).sum())(x), slope @ w, rtol=1e-4, atol=1e-7)
    tangent = np.ones_like(x)
    np.testing.assert_allclose(rlx.jvp(f, (x,), (tangent,))[1], slope * (tangent @ w.T), rtol=1e-4, atol=1e-7)


def test_several_outputs_are_a_dict_and_a_cache_is_left_out() -> None:
    flow = ModelFlow("two").input("x", ("n", 2)).store_stream("in").custom(lambda e, v: v * 2).outputs("out", "in")
    outputs = flow.as_function({})(np.ones((1, 2), f32))
    assert {k: v.tolist() for k, v in outputs.items()} == {"out": [[2, 2]], "in": [[1, 1]]}
    cached = FLOW.kv_cache(LAYERS, KV, DIM // HEADS)
    np.testing.assert_array_equal(cached.as_function(PARAMS)(TOKENS), FLOW.as_function(PARAMS)(TOKENS))
    generating = rlx.load(FLOW, params=PARAMS).flow  # with a cache, and of selected tokens only
    np.testing.assert_array_equal(generating.as_function(PARAMS)(TOKENS), FLOW.as_function(PARAMS)(TOKENS))


def test_what_a_function_of_a_flow_does_not_take_is_named() -> None:
    f = FLOW.as_function(PARAMS)
    for call, message in (
        (lambda: f(TOKENS, TOKENS), "flow 'mine': takes tokens, found 2 inputs"),
        (lambda: f(), "flow 'mine': input 'tokens' is missing"),
        (lambda: f(TOKENS, tokens=TOKENS), "input 'tokens' is given twice"),
        (lambda: f(token=TOKENS), "nothing is called 'token'"),
        (lambda: f(TOKENS[0]), r"input 'tokens': is i32\[7\], expected i32\[batch, seq\]"),
        (lambda: f(TOKENS.astype(f32)), r"input 'tokens': is f32\[2, 7\], expected i32"),
        (lambda: FLOW.as_function([1]), "as_function: params are a list"),
        (lambda: rlx.grad(FLOW), "grad: takes a function, found ModelFlow"),
        (lambda: rlx.jit(FLOW.build(PARAMS)), "jit: takes a function, found BuiltModel"),
    ):
        with pytest.raises(RlxError, match=message) as caught:
            call()
        assert "missing" not in message or "takes tokens, in order or by name" in caught.value.notes[0]


# -- as a model -------------------------------------------------------------------------------------------------------
@pytest.fixture(scope="module")
def model() -> rlx.LanguageModel:
    return rlx.load(FLOW, params=PARAMS)


def greedy(ids: list[int], count: int) -> list[int]:
    """The next tokens by torch, without a cache."""
    ids = list(ids)
    for _ in range(count):
        ids.append(int(torch_logits(PARAMS, np.array([ids]))[0, -1].argmax()))
    return ids[-count:]


def test_a_flow_of_ones_own_generates_what_torch_does(model: rlx.LanguageModel) -> None:
    prompts = [[3, 1, 4], [9], [2, 7, 1, 8, 2, 8]]
    for prompt, completion in zip(prompts, model.generate(prompts, max_tokens=8), strict=True):
        assert completion.tokens == greedy(prompt, 8)
    completion = model.generate(prompts[0], max_tokens=8)
    assert completion.tokens == greedy(prompts[0], 8) and completion.usage.prompt_tokens == 3
    wanted = torch_logits(PARAMS, np.array([prompts[2]]))[0].numpy()
    np.testing.assert_allclose(model.logits(prompts[2]), wanted, rtol=2e-4, atol=2e-4)
    captured = model.run(prompts[0], capture=["layers.*", "logits"])
    assert {k: v.shape for k, v in captured.items()} == {
        "layers.0": (3, DIM), "layers.1": (3, DIM), "logits": (3, VOCAB),
    }  # fmt: skip
    assert not model.apply({name: np.zeros_like(v) for name, v in PARAMS.items()}, [1, 2]).any()
    assert model.context == CONTEXT  # of its RoPE tables
    built = rlx.load(FLOW.build(PARAMS), context=32)
    assert built.context == 32 and built.generate(prompts[0], max_tokens=8).tokens == greedy(prompts[0], 8)


def test_a_flow_with_learned_positions_and_its_own_cache_generates() -> None:
    def flow(cached: bool) -> ModelFlow:
        start = ModelFlow("learned").input("tokens", ("batch", "seq"), "i32")
        start = start.kv_cache(1, 2, 8) if cached else start.input("positions", ("batch", "seq"), "i32")
        start = start.embed("embed", shape=(20, 16)).gather_add("positions", "places", rows=12)
        start = start.attention("attn", 2, rope=None)
        return (start.gather_last_token() if cached else start).lm_head(20, 16, tied=False)

    params = {k: v * 20 for k, v in flow(True).init(rlx.random.key(3)).items()}
    f = flow(False).build(params).compile()
    ids = [4, 2]
    for _ in range(5):
        row = np.array([ids], i32)
        ids.append(int(f.run({"tokens": row, "positions": np.arange(len(ids), dtype=i32)[None]})[0][0, -1].argmax()))
    for own in (flow(True), flow(False)):
        assert rlx.load(own, params=params, context=12).generate([4, 2], max_tokens=5).tokens == ids[2:]


def test_texts_go_through_a_tokenizer(model: rlx.LanguageModel) -> None:
    letters = Tokenizer.from_characters("hello world\n")
    assert letters.vocab_size == 9 and letters.decode(letters.encode("well\nhold")) == "well\nhold"
    assert letters.encode("\n dehlorw") == list(range(9))
    with pytest.raises(RlxError):
        letters.encode("q")
    flow = ModelFlow("letters").input("tokens", ("batch", "seq"), "i32").rope(32, 8).embed("e", shape=(9, 16))
    flow = flow.attention("a", 2).lm_head(9, 16, tied=True)
    params = {k: v * 20 for k, v in flow.init(rlx.random.key(0)).items()}
    own = rlx.load(flow, params=params, tokenizer=letters)
    ids = letters.encode("hell")
    assert own.generate("hell", max_tokens=6).text == letters.decode(own.generate(ids, max_tokens=6).tokens)
    with own.stream("hell", max_tokens=6) as stream:
        assert "".join(stream) == own.generate("hell", max_tokens=6).text
    with pytest.raises(CapabilityError, match="mine: has no tokenizer") as caught:
        model.generate("text")
    assert "tokenizer=" in caught.value.notes[0]


def test_what_cannot_be_a_model_is_named(model: rlx.LanguageModel) -> None:
    tokens = ModelFlow("f").input("tokens", ("batch", "seq"), "i32").embed("e", shape=(9, 16))
    params = {"e": np.zeros((9, 16), f32)}
    seen = tokens.attention("a", 2, rope=None, mask="none").lm_head(9, 16, tied=True)
    named = ModelFlow("f").input("ids", ("batch", "seq"), "i32").embed("e", shape=(9, 16)).lm_head(9, 16, tied=True)
    more = tokens.gather_add("types", "e").attention("a", 2, rope=None).lm_head(9, 16, tied=True)
    for call, kind, message in (
        (lambda: rlx.load(FLOW), BindError, "load: flow 'mine' has no params"),
        (lambda: rlx.load(tokens.custom(lambda e, v: e.mean(v)), params=params), GraphError, "ends in f32"),
        (lambda: rlx.load(tokens, params=params), GraphError, "flow 'f' has no attention stage"),
        (lambda: rlx.load(seen, params=seen.init(rlx.random.key(0))), GraphError, "attends to later tokens"),
        (lambda: rlx.load(named, params=params), GraphError, "first input of flow 'f' is 'ids'"),
        (lambda: rlx.load(more, params=more.init(rlx.random.key(0))), GraphError, "has an input 'types'"),
        (lambda: rlx.load("nothing", params={}), RequestError, "params and tokenizer are those of a flow"),
        (lambda: rlx.load(FLOW, params=PARAMS, tokenizer=3), RequestError, "load: tokenizer is a int"),
        (lambda: model.save("x"), CapabilityError, "save: 'mine' is a flow of your own"),
        (lambda: model.export("x.rlxp"), CapabilityError, "the weights of flow 'mine' are in no file"),
    ):
        with pytest.raises(kind, match=message):
            call()


# -- built flows wherever a module is ---------------------------------------------------------------------------------
def test_a_built_flow_is_taken_wherever_a_module_is() -> None:
    built = FLOW.build(PARAMS)
    (wanted,) = built.compile().run({"tokens": TOKENS})
    config = rlx.ModelExecutionConfig.prefill(2, 7)
    modes = rlx.CompilationMode
    for run in (
        rlx.compile(built), rlx.Session().compile(built), config.compile(built),
        config.with_mode(modes.LAZY).compile(built), built.with_execution_config(config).compile(),
        built.with_execution_config(rlx.ModelVariant.prefill(2, 7)).compile(),
    ):  # fmt: skip
        np.testing.assert_allclose(run.run({"tokens": TOKENS})[0], wanted, rtol=1e-5, atol=1e-5)
    end = FLOW.custom(lambda e, v: e.mean(v * v)).build(PARAMS)
    graph = rlx.transforms.grad(end, "norm")
    assert graph.outputs[0].shape == (DIM,) and rlx.transforms.vmap(graph, {"tokens": 0}).outputs[0].rank == 2
    with pytest.raises(GraphError, match="with_execution_config: found a int"):
        built.with_execution_config(3)  # type: ignore[arg-type]
    with pytest.raises(GraphError, match="grad: ModelFlow is neither"):
        rlx.transforms.grad(FLOW)
    with pytest.raises(GraphError, match="compile: takes a Graph, found ModelFlow") as caught:
        rlx.compile(FLOW)
    assert "flow.build(params)" in caught.value.notes[0]


# -- text -------------------------------------------------------------------------------------------------------------
def test_a_flow_prints_as_a_short_tree() -> None:
    assert repr(FLOW) == "<flow 'mine': 5 stages from tokens to logits>"
    lines = str(FLOW).splitlines()
    assert lines[0] == "flow 'mine': tokens: i32[batch, seq]" and lines[-1] == "-> logits"
    assert "  layers.0 to layers.1" in lines and "    dropout: Dropout(rate=0.1)" in lines
    assert "  head: LmHead(vocab_size=61, hidden_size=32, tie_word_embeddings=True)" in lines
    assert len(lines) == 16 and max(map(len, lines)) < 100
    paths = [line.strip().split(":")[0] for line in lines if line.startswith("    ") and ":" in line]
    assert paths == ["norm", "attn", "dropout", "norm", "ffn"]
    assert "Dropout" in FLOW._repr_html_()
    assert repr(FLOW.build(PARAMS)) == "<built 'mine': tokens -> logits: f32[batch, seq, 61], 20 weights, 2 computed>"


def test_a_tree_shows_what_was_edited_and_what_is_left_out() -> None:
    def layer(i: int) -> LayerStack:
        stack = LayerStack().rms_norm(f"l.{i}.norm", EPS).attention(f"l.{i}.attn", 2, rope=None)
        return stack.swiglu(f"l.{i}.g", f"l.{i}.u", f"l.{i}.d", intermediate_size=2)

    flow = (
        ModelFlow("f").input("x", ("batch", "seq", 8)).repeat_layers(12, layer).layer("end", lambda s: s.dropout(0.1))
    )
    lines = str(flow).splitlines()
    assert lines[1] == "  layers.0 to layers.11" and len(lines) == 8
    assert lines[3] == "    attn: Attention(prefix='l.0.attn', num_heads=2, rope=None)"
    lines = str(flow.edit("layers.2.ffn", lambda stage: None).edit("end", lambda stage: None)).splitlines()
    heads = [line for line in lines if not line.startswith("    ")]
    assert heads[1:-1] == ["  layers.0 to layers.1", "  layers.2", "  layers.3 to layers.11", "  end: removed"]
    assert sum("ffn" in line for line in lines) == 2


def test_a_class_stage_gets_the_ops_of_functions() -> None:
    class Shifted(rlx.FlowStage):
        def emit(self, ctx: Any, value: Any) -> Any:
            return ctx.wrap(ctx.softmax(value, axis=-1) + ctx.zeros(value.shape) + 1)

    x = np.array([[0.0, 1.0]], f32)
    (y,) = ModelFlow("f").input("x", (1, 2)).stage(Shifted()).build().compile().run({"x": x})
    np.testing.assert_allclose(y, np.exp(x) / np.exp(x).sum() + 1, rtol=1e-6)


def test_patterns_of_weight_names_match_any_case_and_must_match() -> None:
    flow = ModelFlow("f").input("x", ("n", 4)).linear("fc.weight", out=3).layer_norm("LayerNorm", EPS)
    params = flow.initialised({"*norm*weight": 0.5}).init(rlx.random.key(0))
    assert (params["LayerNorm.weight"] == 0.5).all() and params["fc.weight"].std() < 0.1
    with pytest.raises(BindError, match=r"init: no weight matches '\*\.wght'"):
        flow.initialised({"*.wght": 0.5}).init(rlx.random.key(0))
    flow.initialised({"*.wght": 0.5}, strict=False).init(rlx.random.key(0))
    with pytest.raises(GraphError, match="a str is not a weight source") as caught:
        flow.build("weights.safetensors")  # type: ignore[arg-type]
    assert "open_tensors('weights.safetensors')" in caught.value.notes[0]


def test_encoder_layers_are_told_their_inner_size() -> None:
    flow = ModelFlow("f").input("x", ("batch", "seq", 8)).gelu_ffn("a", "b", "c", "d", intermediate_size=6)
    params = flow.repeat_bert_layers(1, "bert", 8, 2, EPS, intermediate_size=5).init(rlx.random.key(0))
    assert params["a"].shape == (6, 8) and params["bert.0.intermediate.dense.weight"].shape == (5, 8)
    flow = ModelFlow("f").input("x", ("batch", "seq", 8)).rope(4, 4)
    params = flow.repeat_nomic_layers(1, "nomic", 8, 2, EPS, intermediate_size=7).init(rlx.random.key(0))
    assert params["nomic.0.mlp.fc2.weight"].shape == (8, 7)


def test_init_names_all_weights_of_unknown_shape_at_once() -> None:
    flow = ModelFlow("f").input("x", ("n", 6)).linear("a").swiglu("g", "u", "d")
    flow = flow.custom(lambda emit, v: v * emit.load_param("scale"))
    with pytest.raises(BindError) as caught:
        flow.init(rlx.random.key(0))
    message = "init: no stage says which shapes 3 weights have: 'a' [?, 6], 'g' [?, ?], 'scale'"
    assert str(caught.value) == message
    hint = caught.value.notes[0]
    assert "shapes={'a': (64, 6)}" in hint and "out=64" in hint and "intermediate_size=64" in hint
    shapes = {"a": (8, 6), "g": (4, 8), "u": (4, 8), "d": (8, 4), "scale": (8,)}
    assert {k: v.shape for k, v in flow.init(rlx.random.key(0), shapes=shapes).items()} == shapes
    named = {name: shapes[name] for name in ("a", "g", "scale")}  # those of 'u' and 'd' follow
    assert {k: v.shape for k, v in flow.init(rlx.random.key(0), shapes=named).items()} == shapes
    with pytest.raises(BindError, match=r"which shape weight 'w' \[\?, 6\] has"):
        ModelFlow("f").input("x", ("n", 6)).linear("w").init(rlx.random.key(0))


def test_emit_has_zeros() -> None:
    flow = (
        ModelFlow("z")
        .input("x", ("n", 3))
        .custom(lambda emit, v: emit.concatenate(emit.zeros((v.shape[0], 2)), v, axis=1))
    )
    (y,) = flow.build().compile().run({"x": np.ones((2, 3), f32)})
    assert y.tolist() == [[0, 0, 1, 1, 1]] * 2


# -- both worlds ------------------------------------------------------------------------------------------------------
@rlx.custom_vjp
def clipped(x: Any) -> Any:
    """x, with gradients of at most 1."""
    return x * 1.0


clipped.defvjp(lambda x: (x * 1.0, None), lambda _, g: (rlx.clip(g, -1.0, 1.0),))


def test_functions_of_arrays_take_values_of_flows_and_graphs() -> None:
    x = np.array([-2.0, 0.5, 3.0], f32)

    def f(v: Any) -> Any:
        return rlx.where(v > 1, np.tanh(v), clipped(v)) + np.maximum(v, 0) + rlx.vmap(rlx.sin)(v)

    wanted = np.where(x > 1, np.tanh(x), x) + np.maximum(x, 0) + np.sin(x)
    flow = ModelFlow("f").input("x", (3,)).custom(lambda emit, v: f(v))
    g = rlx.Graph("g")
    g.set_outputs([f(g.input("x", (3,)))])
    for run in (flow.build().compile(), rlx.compile(g)):
        np.testing.assert_allclose(run.run({"x": x})[0], wanted, rtol=1e-6)
    np.testing.assert_allclose(flow.as_function({})(x), wanted, rtol=1e-6)

    scaled = ModelFlow("s").input("x", (3,)).custom(lambda emit, v: clipped(v) * 5.0)
    assert rlx.grad(lambda x: scaled.as_function({})(x).sum())(x).tolist() == [1.0, 1.0, 1.0]
    loss = scaled.custom(lambda emit, v: emit.sum(v)).build()
    (slope,) = rlx.compile(rlx.transforms.grad(loss, "x")).run({"x": x})
    assert slope.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    "f",
    [
        lambda v: np.where(v > 1, v, 0.0), lambda v: np.sum(v, axis=0), lambda v: np.stack([v, v * 2]),
        lambda v: np.concatenate([v, np.ones((1, 3), f32)]), lambda v: np.einsum("ij,kj->ik", v, v),
        lambda v: np.log1p(v), lambda v: np.maximum(v, 2.5) - np.mean(v, axis=-1, keepdims=True),
    ],
)  # fmt: skip
def test_numpy_on_values_of_flows_and_graphs(f: Any) -> None:
    x = np.arange(6, dtype=f32).reshape(2, 3)
    flow = ModelFlow("f").input("x", (2, 3)).custom(lambda emit, v: f(v))
    g = rlx.Graph("g")
    g.set_outputs([f(g.input("x", (2, 3)))])
    for run in (flow.build().compile(), rlx.compile(g)):
        np.testing.assert_allclose(run.run({"x": x})[0], f(x), rtol=1e-6)


def test_control_flow_and_trees_on_values_of_flows() -> None:
    x = np.arange(6, dtype=f32).reshape(2, 3) - 1

    def f(emit: Any, v: Any) -> Any:
        parts = rlx.jit(lambda tree: {"a": tree["v"] * 2, "b": tree["w"][0]})({"v": v, "w": [v + 1]})
        chosen = rlx.cond(v.sum() > 0, lambda a: a, lambda a: -a, parts["a"])
        return chosen + parts["b"] + rlx.scan(lambda c, row: (c + row, c), v[0], v)[1]

    run = ModelFlow("f").input("x", (2, 3)).custom(f).build().compile()
    for data in (x, -x):
        chosen = data * 2 if data.sum() > 0 else -data * 2
        wanted = chosen + data + 1 + np.stack([data[0], data[0] * 2])
        np.testing.assert_allclose(run.run({"x": data})[0], wanted, rtol=1e-6)


def test_a_function_of_quantised_weights_computes_with_their_numbers() -> None:
    scales, numbers = np.array([0.5, 0.25], np.float16), np.arange(64, dtype=np.int8).reshape(2, 32) - 30
    blocks = np.concatenate([scales.reshape(2, 1).view(np.uint8), numbers.view(np.uint8)], axis=1)
    packed = np.ascontiguousarray(blocks).view(rlx.dtype("q8_0").numpy)  # [2, 1]: one block per row
    flow = ModelFlow("q").input("x", ("n", 32)).linear("w")
    x = np.random.default_rng(0).normal(0, 1, (3, 32)).astype(f32)
    wanted = x @ (scales[:, None].astype(f32) * numbers).T
    np.testing.assert_allclose(flow.as_function({"w": packed})(x), wanted, rtol=1e-4)
