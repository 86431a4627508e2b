"""CPU seconds of two ways to do the same work, in turn, so that a busy machine disturbs both alike."""

import statistics
import time
from collections.abc import Callable


def cpu(work: Callable[[], object]) -> float:
    """CPU seconds of this process while `work` runs."""
    start = time.process_time()
    work()
    return time.process_time() - start


def ratio(ours: Callable[[], object], bar: Callable[[], object], pairs: int = 5) -> tuple[float, float, float]:
    """Medians over `pairs` of: our CPU seconds, the bar's, and the ratio of a pair. One pair first, uncounted."""
    cpu(bar), cpu(ours)
    runs = [(cpu(ours), cpu(bar)) for _ in range(pairs)]
    each = [a / b for a, b in runs]
    return (
        statistics.median(a for a, _ in runs),
        statistics.median(b for _, b in runs),
        statistics.median(each),
    )
