"""Text streams for asyncio: a thread runs the model, and the event loop gets the pieces."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import TYPE_CHECKING, Self

if TYPE_CHECKING:
    from rlx.engine.language_model import Completion, TextStream


class AsyncTextStream(AsyncIterator[str]):
    """Iterates over pieces of a text while it is generated. Use it in `async with`, or close it, to stop early."""

    def __init__(self, stream: TextStream) -> None:
        self._stream = stream
        self._pieces: asyncio.Queue[str | BaseException | None] | None = None  # None ends it
        self._thread: threading.Thread | None = None
        self._ended = False

    def _start(self) -> asyncio.Queue[str | BaseException | None]:
        loop, pieces = asyncio.get_running_loop(), asyncio.Queue[str | BaseException | None]()

        def put(item: str | BaseException | None) -> None:
            if not loop.is_closed():
                loop.call_soon_threadsafe(pieces.put_nowait, item)

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
            item = await pieces.get()
        except asyncio.CancelledError:
            self._stream.close()
            raise
        if isinstance(item, str):
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
        """The text so far."""
        return self._stream.text

    @property
    def completion(self) -> Completion:
        """The text, its tokens, usage and timings. Raises NotEndedError while the stream is running."""
        return self._stream.completion

    def __del__(self) -> None:
        self._stream.close()  # a loop that was left by `break`

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.aclose()
