"""Tasks that kill their process, or stop it. Workers import this file, so it imports little."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path
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

    def results(self, model: Any, shard: Shard, records: Any, beat: Any) -> Any:
        if shard.number == self.shard:
            os.kill(os.getpid(), 9)
        return super().results(model, shard, records, beat)


@dataclass(frozen=True)
class Hanging(Score):
    """Stops its process in the middle of a shard, once or `times` times: nothing runs in it any more."""

    shard: int = 1
    folder: str = ""  # notes how often it has hung
    times: int = 1

    verb: ClassVar[str] = "score"

    def settings(self) -> dict[str, Any]:
        """Those of a task that does not hang, whose results it has."""
        return Score(self.model, self.load, self.field, self.per_token).settings()

    def results(self, model: Any, shard: Shard, records: Any, beat: Any) -> Any:
        hung = len(list(Path(self.folder).iterdir()))
        if shard.number == self.shard and hung < self.times:
            (Path(self.folder) / str(hung)).write_text(str(os.getpid()))
            os.kill(os.getpid(), signal.SIGSTOP)
        return super().results(model, shard, records, beat)
