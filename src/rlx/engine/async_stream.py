"""Text streams for asyncio: a thread runs the model, and the event loop gets the pieces."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Any, Self

from rlx.errors import shortened

if TYPE_CHECKING:
    from rlx.engine.language_model import Completion, TextStream
    from rlx.engine.logprobs import Logprob

# A piece, an error or the end (None), and the number of tokens so far.
_Item = tuple[str | BaseException | None, int]


class AsyncTextStream(AsyncIterator[str]):
    """Iterates over pieces of a text while it is generated. Use it in `async with`, or `await aclose()`, to stop early.

    `text`, `tokens` and `logprobs` are those of the pieces that were read, although the model may be ahead of them, and
    of the whole text once the stream has ended or was closed. `completion` is available then.
    """

    def __init__(self, stream: TextStream) -> None:
        self._stream = stream
        self._pieces: asyncio.Queue[_Item] | None = None
        self._thread: threading.Thread | None = None
        self._ended = False
        self._text, self._token_count = "", 0  # of the pieces that were read

    def _start(self) -> asyncio.Queue[_Item]:
        loop, pieces = asyncio.get_running_loop(), asyncio.Queue[_Item]()

        def put(item: str | BaseException | None) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(pieces.put_nowait, (item, len(self._stream.tokens)))

        def run() -> None:
            try:
                for piece in self._stream:
                    put(piece)
                put(None)
            except BaseException as error:  # raised where the pieces are awaited
                put(error)

        self._pieces = pieces
        self._thread = threading.Thread(target=run, name="rlx-astream", daemon=True)
        self._thread.start()
        return pieces

    async def __anext__(self) -> str:
        if self._ended:
            raise StopAsyncIteration
        pieces = self._start() if self._pieces is None else self._pieces
        try:
            item, self._token_count = await pieces.get()
        except asyncio.CancelledError:
            self._stream.close()
            raise
        if isinstance(item, str):
            self._text += item
            return item
        self._ended = True
        if item is not None:
            raise item
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """Stop generating; returns once the model has stopped."""
        self._ended = True
        self._stream.close()
        if self._thread is not None:
            await asyncio.to_thread(self._thread.join)
            self._stream.close()

    @property
    def text(self) -> str:
        """The text so far: all pieces that were read."""
        return self._stream.text if self._ended else self._text

    @property
    def tokens(self) -> list[int]:
        """The tokens so far. A piece may be the text of several: one token need not be a whole character."""
        return self._stream.tokens if self._ended else self._stream.tokens[: self._token_count]

    @property
    def logprobs(self) -> list[Logprob] | None:
        """The log-probabilities of `tokens`; None unless `logprobs=` was given."""
        logprobs = self._stream.logprobs
        return logprobs if logprobs is None or self._ended else logprobs[: self._token_count]

    @property
    def completion(self) -> Completion:
        """The text, its tokens, usage and timings. Raises NotEndedError while the stream is running."""
        return self._stream.completion

    def __repr__(self) -> str:
        state = "ended" if self._ended else "running"
        return f"<async stream {shortened(self.text, 60)!r}: {len(self.tokens)} tokens, {state}>"

    if not TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any:
            """Called for missing attributes: names of other streams raise an explanation."""
            if name == "completion":
                return self._stream.completion  # raises that it has not ended
            hint = ": await aclose() stops it" if name in ("close", "stop", "cancel", "abort", "interrupt") else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{hint}")

    def __del__(self) -> None:
        self._stream.close()  # a loop that was left by `break`

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
