"""A task that kills its process. Workers import this file, so it imports little."""

from __future__ import annotations

import os
from dataclasses import dataclass
from typing import Any, ClassVar

from rlx.batch.inputs import Shard
from rlx.batch.score_task import Score


@dataclass(frozen=True)
class Deadly(Score):
    """Kills its process at a shard, or while it loads."""

    shard: int = -1

    verb: ClassVar[str] = "score"

    def check(self, model: Any) -> None:
        if self.shard < 0 and "RAYON_NUM_THREADS" in os.environ:  # in a worker
            os.kill(os.getpid(), 9)

    def results(self, model: Any, shard: Shard, records: Any) -> Any:
        if shard.number == self.shard:
            os.kill(os.getpid(), 9)
        return super().results(model, shard, records)
