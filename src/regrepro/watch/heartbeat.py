"""Says when the loop of `watch` stands still, by a thread of its own: what it waits for may never come."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

STUCK_SECONDS = 60.0  # the loop comes around every ten seconds and a half at the latest


class Heartbeat:
    """`stuck` is called once, with why, when nothing has beaten for `seconds`, `again` when it goes on."""

    def __init__(
        self, stuck: Callable[[str], None], again: Callable[[], None], seconds: float = STUCK_SECONDS
    ) -> None:
        self._stuck, self._again, self._seconds = stuck, again, seconds
        self._at, self._doing = time.monotonic(), "starting"
        self._ended = threading.Event()
        self._told = False
        self._thread = threading.Thread(target=self._watch, name="heartbeat", daemon=True)

    def start(self) -> None:
        """Begin to listen."""
        self._at = time.monotonic()
        self._thread.start()

    def beat(self, doing: str) -> None:
        """The loop goes on, and does this next."""
        self._at, self._doing = time.monotonic(), doing
        if self._told:
            self._told = False
            self._again()

    def stop(self) -> None:
        """Listen no more."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join()

    def _watch(self) -> None:
        while not self._ended.wait(self._seconds / 4):
            silent = time.monotonic() - self._at
            if silent >= self._seconds and not self._told:
                self._told = True
                self._stuck(f"nothing has been watched for {silent:.0f} s: it stands still at {self._doing}")
