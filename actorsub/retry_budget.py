"""The budget that limits how many calls which may have run are sent again."""

from __future__ import annotations

import collections
import itertools
import time

#: One resend is allowed for each RETRY_EVERY calls, and RETRY_FLOOR per second besides.
RETRY_EVERY = 5
RETRY_FLOOR = 10


class RetryBudget:
    """A bucket of tokens, one for each resend, so that resends do not make an outage worse.

    Without a lock, see fence.py.
    """

    def __init__(self) -> None:
        self._tokens = collections.deque([None] * RETRY_FLOOR, maxlen=100 * RETRY_FLOOR)
        self._calls = itertools.count(1)
        # When the floor was filled last. The thread that takes the time out fills the floor and puts the new time in.
        self._filled_s = [time.monotonic()]

    def deposit(self) -> None:
        """One call was made."""
        if next(self._calls) % RETRY_EVERY == 0:
            self._tokens.append(None)

    def take(self) -> bool:
        self._fill()
        try:
            self._tokens.pop()
        except IndexError:
            return False
        return True

    def _fill(self) -> None:
        try:
            filled_s = self._filled_s.pop()
        except IndexError:
            return
        # Whole tokens only; the rest of the time counts for the next one.
        tokens = max(0, int((time.monotonic() - filled_s) * RETRY_FLOOR))
        for _ in range(min(tokens, RETRY_FLOOR - len(self._tokens))):
            self._tokens.append(None)
        self._filled_s.append(filled_s + tokens / RETRY_FLOOR)
