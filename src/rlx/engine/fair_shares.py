"""Fair shares between clients: deficit round robin, counted in tokens (Shreedhar and Varghese, 1995)."""

from __future__ import annotations

from collections.abc import Collection

QUANTUM = 256  # tokens of a turn
DEBT = 4  # turns that a client can owe at most: decoding does not wait for its turn


class FairShares:
    """Whose turn it is. A client has its turn until its credit is used up; credit is forgotten when it has no work."""

    def __init__(self, quantum: int = QUANTUM) -> None:
        self._quantum = quantum
        self._credit: dict[str, int] = {}  # by client, whose turn is next first

    def choose(self, clients: Collection[str]) -> str:
        """The client among those with work whose turn it is."""
        for client in clients:
            self._credit.setdefault(client, self._quantum)
        while True:
            for client, credit in self._credit.items():
                if credit > 0 and client in clients:
                    return client
            for client in clients:
                self._credit[client] += self._quantum

    def copy(self) -> FairShares:
        """The same state, to look ahead."""
        other = FairShares(self._quantum)
        other._credit = dict(self._credit)
        return other

    def charge(self, client: str, tokens: int) -> None:
        """Count computed tokens; a client that has no rival pays nothing."""
        if len(self._credit) < 2 or client not in self._credit:
            return
        self._credit[client] = max(self._credit[client] - tokens, -DEBT * self._quantum)
        if self._credit[client] <= 0:
            self._credit[client] = self._credit.pop(client)  # to the end of the round

    def keep(self, clients: Collection[str]) -> None:
        """Forget clients without work."""
        for client in [c for c in self._credit if c not in clients]:
            del self._credit[client]
