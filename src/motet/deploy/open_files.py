"""How many files a server may have open: a gateway has five for each worker that it keeps, two for each group, and the
1024 that many systems begin with are spent on two hundred workers."""

import resource

WANTED = 65_536


def allow_open_files(wanted: int = WANTED) -> int:
    """Raises this process's own limit as far as `wanted` and the system allow; returns what it is now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    unlimited = resource.RLIM_INFINITY
    most = wanted if hard == unlimited else min(wanted, hard)
    if soft == unlimited or soft >= most:
        return soft
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    return most
