"""Steps that the kernel refuses with EBUSY while somebody is still letting go."""

from __future__ import annotations

import errno
import time
from collections.abc import Callable


def when_free(step: Callable[[], object], limit: float = 2.0) -> None:
    """Do a step, again and again while it fails with EBUSY, for `limit` seconds. Raises OSError."""
    deadline = time.monotonic() + limit
    while True:
        try:
            step()
            return
        except OSError as error:
            if error.errno != errno.EBUSY or time.monotonic() > deadline:
                raise
            time.sleep(0.02)
