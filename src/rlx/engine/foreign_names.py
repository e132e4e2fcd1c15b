"""Names of other programs for settings and methods of models: what they are called here, or what to do instead."""

from __future__ import annotations

from collections.abc import Iterable

from rlx.errors import UnknownAttribute, nearest

# settings of generate, chat and stream that have another name here
SETTINGS = {
    "temp": "temperature", "do_sample": "temperature", "topk": "top_k", "topp": "top_p", "minp": "min_p",
    "repeat_penalty": "repetition_penalty", "penalty_repeat": "repetition_penalty",
    "penalty_freq": "frequency_penalty", "penalty_present": "presence_penalty", "alpha_frequency": "frequency_penalty",
    "alpha_presence": "presence_penalty", "random_seed": "seed", "bias": "logit_bias",
    "sequence_bias": "logit_bias", "max_new_tokens": "max_tokens", "max_length": "max_tokens",
    "num_predict": "max_tokens", "n_predict": "max_tokens", "max_completion_tokens": "max_tokens",
    "max_output_tokens": "max_tokens", "stop_strings": "stop", "stop_sequences": "stop", "until": "stop",
    "n_probs": "logprobs", "return_logprobs": "logprobs", "output_scores": "logprobs",
    "system_prompt": "system", "hooks": "edit", "steering": "edit", "interventions": "edit",
    "output_hidden_states": "capture", "output_attentions": "capture", "return_hidden_states": "capture",
    "prefix_allowed_tokens_fn": "allowed", "profile": "trace", "profiler": "trace",
    "n_ctx": "context in rlx.load", "num_ctx": "context in rlx.load", "n_threads": "threads in rlx.load",
    "num_threads": "threads in rlx.load",
}  # fmt: skip
_CONSTRAINED = "schema= takes a JSON schema; regex=, choice= and grammar= are the other forms"
_HISTORY = 'chat takes the conversation as a list of messages: [{"role": "user", "content": "..."}, ...]'
_STREAM = "model.stream(...) returns the text piece by piece"
_TOOLS = "chat(messages, tools=[function]) runs functions that the model calls"
_SEVERAL = "several samples: model.generate([prompt] * 3, temperature=1.0)"
_PARAMS = "model.apply(params, tokens) runs other weights; model.save(path, params) writes a model with them"
_KEEPS = "a model keeps its weights: model.apply(params, tokens) runs others, model.save(path, params) writes a model"
_BEAMS = "there is no beam search: model.score compares texts"
# settings that mean something else here, or that do not exist
ADVICE = {
    "json": _CONSTRAINED, "json_schema": _CONSTRAINED, "format": _CONSTRAINED, "response_format": _CONSTRAINED,
    "guided_json": _CONSTRAINED,
    "history": _HISTORY, "messages": _HISTORY, "memory": _HISTORY, "session": _HISTORY, "conversation": _HISTORY,
    "stream": _STREAM, "streamer": _STREAM, "callback": _STREAM, "on_token": _STREAM, "token_callback": _STREAM,
    "tools": _TOOLS, "functions": _TOOLS, "tool_choice": _TOOLS, "function_call": _TOOLS,
    "n": _SEVERAL, "num_return_sequences": _SEVERAL, "best_of": _SEVERAL,
    "batch_size": "a list of prompts is one batch: generate([text, text])",
    "num_beams": _BEAMS, "beam_width": _BEAMS,
    "system": "a system message belongs to a conversation: chat(messages, system=...), or stream(..., chat=True)",
    "chat": "chat(messages) answers a conversation; stream(text, chat=True) streams the answer",
    "echo": "model.score(text) returns the log-probabilities of a given text",
    "prompt_logprobs": "model.score(text) returns the log-probabilities of a given text",
    "bad_words_ids": "logit_bias={token: -math.inf} bans a token",
    "stop_token_ids": "stop= takes texts; logit_bias={token: -math.inf} bans a token",
    "eos_token_id": "the model's files say which tokens end a text; stop= takes texts",
    "timeout": "close a stream from another thread: threading.Timer(seconds, stream.close).start()",
    "cache_prompt": "the prefix cache is always used; usage.cached_tokens says how much came from it",
    "top_logprobs": "logprobs=2 returns the log-probability of each token and of the 2 likeliest ones",
    "use_cache": "the KV cache is always used",
    "verbose": "model.report(prompt) says where the time goes",
    "params": _PARAMS, "weights": _PARAMS, "state_dict": _PARAMS,
    "tfs_z": "there is no tail-free sampling", "mirostat": "there is no Mirostat",
    "typical_p": "there is no typical sampling",
}  # fmt: skip

# settings of generate and chat besides those of Sampling
REQUEST_SETTINGS = (
    "max_tokens", "stop", "logprobs", "schema", "regex", "choice", "grammar", "edit", "capture", "trace", "system",
    "tools", "tool_choice",
)  # fmt: skip

# settings of score
_SCORE_CHAT = "score(answer, prompt=model.chat_tokens(messages)) scores the answer of a conversation"
SCORE_SETTINGS = {
    **dict.fromkeys(("chat", "messages", "system"), _SCORE_CHAT),
    **dict.fromkeys(("edit", "capture"), 'model.run(tokens, edit=..., capture="logits")["logits"] has edited logits'),
    **dict.fromkeys(("context", "prefix"), "here it is called prompt"),
    **dict.fromkeys(("top_logprobs", "top_k", "top"), "here it is called logprobs"),
}

# several prompts for a verb that takes one
ONE_PROMPT = {
    "stream": "one stream per prompt; generate([text, text]) runs a batch",
    "report": 'one prompt per report; generate([text, text], trace="t.json") writes the timeline of a batch',
    **dict.fromkeys(("run", "logits", "apply"), "one call per text: [model.VERB(text) for text in texts]"),
}

# settings of embed
EMBED_SETTINGS = {
    "normalize_embeddings": "here it is called normalize", "show_progress_bar": "here it is called show_progress",
    "prompt_name": "here it is called prompt", "convert_to_numpy": "vectors are NumPy arrays",
    "convert_to_tensor": "vectors are NumPy arrays: torch.from_numpy(vectors)",
    "output_value": "model.run(text, capture=...) has all values",
    "device": "rlx.load(name, device=...)", "max_length": "rlx.load(name, context=...)",
    "params": "model.apply(params, text) runs other weights; model.save(path, params) writes a model with them",
    "pooling": "the model's files say how to pool; model.pooling is its name",
}  # fmt: skip
EMBED_OWN = ("batch_size", "normalize", "truncate", "prompt", "show_progress", "trace")

# attributes of models in other libraries: name -> kind of model ("" for all) -> what there is here
ATTRIBUTES: dict[str, dict[str, str]] = {
    "encode": {"decoder": "model.token_ids(text) returns token ids", "encoder": "model.embed(texts)",
               "vision model": "model.encode_image(images)"},
    "tokenize": {"": "model.token_ids(text) returns token ids"},
    "decode": {"": "model.tokenizer.decode(ids) returns a text"},
    "detokenize": {"": "model.tokenizer.decode(ids) returns a text"},
    "forward": {"decoder": "model.logits(text); model.apply(params, tokens) inside rlx.grad",
                "": "model.run(..., capture=...); model.apply(params, ...) inside rlx.grad"},
    "predict": {"decoder": "model.generate(text), model.chat(messages)", "encoder": "model.embed(texts)",
                "vision model": "model.encode_image(images)"},
    "complete": {"decoder": "model.generate(text)"}, "completion": {"decoder": "model.generate(text)"},
    "ask": {"decoder": "model.chat(text)"}, "respond": {"decoder": "model.chat(text)"},
    "create_chat_completion": {"decoder": "model.chat(messages)"},
    "perplexity": {"decoder": "model.score(text).perplexity"},
    "loglikelihood": {"decoder": "model.score(text, prompt=...).logprob"},
    "agenerate": {"decoder": "await asyncio.to_thread(model.generate, text)"},
    "achat": {"decoder": "await asyncio.to_thread(model.chat, messages)"},
    "history": {"decoder": "keep a list of messages; model.chat(messages) answers it"},
    "trace": {"decoder": 'model.generate(prompt, trace="t.json"), or model.report(prompt)',
              "encoder": 'model.embed(texts, trace="t.json"), or model.report(texts)',
              "": "model.compiled.run(inputs, trace=...)"},
    "profile_run": {"": "model.report()"}, "benchmark": {"": "rlx bench MODEL"},
    "config": {"": "model.checkpoint.config"}, "parameters": {"": "model.params"},
    "named_parameters": {"": "model.params"}, "state_dict": {"": "model.params"},
    **{name: {"": _KEEPS} for name in ("load_state_dict", "set_params", "set_param", "update_params", "load_params")},
    "layers": {"": "model.stages lists the stages, model.facts.layers is their number"},
    **{name: {"": "model.facts.layers"} for name in ("num_layers", "n_layers", "num_hidden_layers")},
    "modules": {"": "model.stages lists the stages"},
    "named_modules": {"": "model.stages lists the stages"}, "hooks": {"": "model.run(tokens, capture=..., edit=...)"},
    "register_forward_hook": {"": "model.run(tokens, capture=..., edit=...)"},
    "graph": {"": "model.compiled.graph"}, "device": {"": "model.compiled.device"},
    "to": {"": 'rlx.load(name, device="...")'}, "half": {"": "rlx.load(name, precision=...)"},
    "eval": {"": "models are always ready to run"}, "train": {"": "rlx.grad of model.apply, see docs/research.md"},
    "max_seq_length": {"encoder": "model.limit"}, "similarity_fn": {"encoder": "model.similarity(a, b)"},
}  # fmt: skip

# attributes of other things in other libraries: class -> name -> what there is here
_APPEND = "index.append(vectors, ids=[...]) adds rows"
_REPLACE = "index.delete([id]), then index.append(vectors, ids=[id])"
_SEARCH = "index.search(text or vector, k=5)"
_TEXT = "completion.text, or str(completion)"
_RATE = "timings.answer_per_second; prompt_per_second is that of the prompt"
RECORD_ATTRIBUTES: dict[str, dict[str, str]] = {
    "Index": {
        **dict.fromkeys(("add", "insert", "add_texts", "add_documents", "add_items", "add_with_ids"), _APPEND),
        **dict.fromkeys(("update", "upsert", "replace"), _REPLACE),
        **dict.fromkeys(("remove", "remove_ids", "drop"), "index.delete([id, ...])"),
        **dict.fromkeys(("query", "similarity_search", "knn_query", "find"), _SEARCH),
        **dict.fromkeys(("count", "size", "ntotal"), "len(index)"),
        **dict.fromkeys(("get", "get_by_id"), "index.texts() and index.metadata() are in the order of index.ids()"),
        **dict.fromkeys(("keys", "list_ids", "list"), "index.ids()"),
        **dict.fromkeys(("save", "commit", "flush", "persist", "write"), "an append is on disk when it returns"),
        "load": "rlx.Index.open(path)",
    },
    "Completion": {
        **dict.fromkeys(("choices", "content", "message", "response", "output", "answer"), _TEXT),
        "token_ids": "completion.tokens", "stop_reason": "completion.finish_reason",
    },
    "Timings": dict.fromkeys(("tokens_per_second", "per_second", "speed", "tokens_per_sec", "rate"), _RATE)
    | {"total_seconds": "timings.prompt_seconds + timings.answer_seconds",
       "time_to_first_token": "timings.prompt_seconds", "ttft": "timings.prompt_seconds"},
    "Score": {
        **dict.fromkeys(("logprobs", "token_logprobs"), "score.tokens: each has token, text, logprob and top"),
        **dict.fromkeys(("score", "total", "loglikelihood"), "score.logprob is the sum over tokens"),
        "mean": "score.logprob / len(score.tokens); score.perplexity is exp of minus that", "ppl": "score.perplexity",
    },
}  # fmt: skip
# settings of the search of an index
SEARCH_SETTINGS = dict.fromkeys(("top_k", "topk", "n", "top", "limit", "n_results", "num_results"), "k")


def missing_attribute(owner: object, name: str) -> AttributeError:
    """The error for an attribute that a thing does not have: with a hint if other libraries have it."""
    kind = type(owner).__name__
    hint = RECORD_ATTRIBUTES.get(kind, {}).get(name)
    if hint is not None:
        return UnknownAttribute(f"{name}: {kind} has no such attribute", hint=hint)
    return AttributeError(f"{kind!r} object has no attribute {name!r}", name=name, obj=owner)


def search_hint(name: str) -> str:
    """What an unknown setting of `Index.search` is called here."""
    return f"here it is called {SEARCH_SETTINGS[name]}" if name in SEARCH_SETTINGS else "known: k, rescore"


def setting_hint(name: str, known: Iterable[str]) -> str:
    """What an unknown setting of a request is called here, or what to do instead."""
    if name in SETTINGS:
        return f"here it is called {SETTINGS[name]}"
    return ADVICE.get(name) or nearest(name, known) or f"known: {', '.join(known)}"


def score_hint(name: str) -> str:
    """What an unknown setting of `score` is called here, or what to do instead."""
    return SCORE_SETTINGS.get(name) or nearest(name, ("prompt", "logprobs")) or "known: prompt, logprobs"


def one_prompt_hint(verb: str, prompts: object) -> str | None:
    """What to do with several prompts; None if the value is something else."""
    if not isinstance(prompts, (list, tuple)) or not all(isinstance(p, (str, list, tuple)) for p in prompts):
        return None
    hint = ONE_PROMPT.get(verb)
    return hint and hint.replace("VERB", verb)


def embed_hint(name: str) -> str:
    """What an unknown setting of `embed` is called here, or what to do instead."""
    return EMBED_SETTINGS.get(name) or nearest(name, EMBED_OWN) or f"known: {', '.join(EMBED_OWN)}"


def attribute_hint(name: str, kind: str) -> str | None:
    """What there is in place of an attribute of other libraries; None if nothing is known of it."""
    hints = ATTRIBUTES.get(name, {})
    return hints.get(kind, hints.get(""))
