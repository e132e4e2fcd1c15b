"""The log-probabilities of texts, after prompts of their own where records have them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

from rlx.batch.inputs import Shard
from rlx.batch.records import Record
from rlx.batch.tasks import Beat, ShardResult, Task, json_line, place, prepare
from rlx.engine.language_model import LanguageModel
from rlx.engine.logprobs import Score as TextScore
from rlx.engine.scoring import ScoredText, score_steps, text_after
from rlx.errors import RequestError
from rlx.fast_dataclass import dataclass


@dataclass(frozen=True)
class Score(Task):
    """With `per_token`, results also have the token ids and their log-probabilities."""

    per_token: bool = False

    verb: ClassVar[str] = "score"
    usual_field: ClassVar[str] = "text"
    kind: ClassVar[str] = "decoder"
    shard_records: ClassVar[int] = 256
    shard_bytes: ClassVar[int] = 256 << 10

    @property
    def columns(self) -> tuple[str, ...]:
        return self.main_field, "prompt", "id"

    def check(self, model: LanguageModel) -> None:
        text_after(model, "a", None, "batch score")

    def results(self, model: LanguageModel, shard: Shard, records: Sequence[Record], beat: Beat) -> ShardResult:
        def read(record: Record) -> ScoredText:
            if record.url is not None:
                raise RequestError("lines in OpenAI's form are for embed and generate, which its API has")
            prompt = record.text("prompt") if record.members.get("prompt") is not None else None
            return text_after(model, record.text(self.main_field), prompt, "score")

        read_texts, failures = prepare(records, read)
        texts = [text for _, text in read_texts]
        scores = [TextScore([]) for _ in texts]
        for _ in score_steps(model, texts, scores, 0):
            beat()
        lines = list[bytes]()
        for (record, _), score in zip(read_texts, scores, strict=True):
            members: dict[str, Any] = {"logprob": _number(score.logprob), "tokens": len(score.tokens)}
            members["perplexity"] = _number(score.perplexity)
            if self.per_token:
                members["token_ids"] = [token.token for token in score.tokens]
                members["token_logprobs"] = [_number(token.logprob) for token in score.tokens]
            lines.append(json_line(place(shard, record) | members))
        tokens = sum(len(text.tokens) for text in texts)
        return ShardResult(b"".join(lines), len(lines), tokens, failures)


def _number(value: float) -> float | None:
    """A number of JSON, which has no NaN: a text without scored tokens has no log-probability."""
    return value if math.isfinite(value) else None
