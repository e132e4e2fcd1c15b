"""How many tokens and sequences one call of a language model takes."""

from rlx.engine.page_pool import SPARE
from rlx.runtime.kv_spec import KvCacheSpec
from rlx.target import Target

CHUNK = 256  # prompt tokens per call, unless the target wants more: an interrupt waits for the end of a call
ROWS = 8  # sequences of a batch
WASTE = 1.25  # maximum padding when prompts are prefilled together


def chunk_tokens(target: Target, spec: KvCacheSpec) -> int:
    """Prompt tokens per call. Rings hold `SPARE` positions beyond their windows."""
    tokens = target.prompt_tokens or CHUNK
    return min(tokens, SPARE) if any(spec.windows) else tokens
