"""The limit of the requests of a batch that are in progress at once.

A server computes more tokens per second the more requests it has, up to a number that depends on its model, its machine
and its other clients. The class finds this number by measuring:

    grow    the limit doubles while the rate of finished work increases with it
    hold    the limit stays for some epochs; then a higher and a lower limit are tried in turn. A lower one is kept if
            it is as good, and a higher one, if it is better, starts to grow again
    cut     the limit is halved when the server refuses a request because of its load; the limit stays if
            nothing has finished since the last cut: such a server is not overloaded, but fails

An epoch ends when as many requests as the limit have finished, and after `MIN_EPOCH_S` at the earliest. Only epochs in
which the limit was reached are compared. The class does no I/O; times are arguments."""

from dataclasses import dataclass, field
from enum import Enum, auto

FIRST_LIMIT = 32
MAX_LIMIT = 1024
MIN_EPOCH_S = 1.0
GAIN = 1.1
"""Minimum increase of the rate, as a factor, for a higher limit to be kept."""
LOSS = 0.95
"""Factor above which the rate must stay for a lower limit to be kept."""
HIGHER, LOWER = 1.5, 0.75
"""Factors of the limits that are tried."""
HOLD_EPOCHS = 6
"""Number of epochs between two trials."""
CUT_INTERVAL_S = 2.0
"""Minimum time between two cuts: refusals of requests that were sent together count as one."""


class LimitPhase(Enum):
    GROW = auto()
    HOLD = auto()
    TRY_HIGHER = auto()
    TRY_LOWER = auto()


@dataclass
class _Epoch:
    start_s: float
    num_finished: int = 0
    work: float = 0.0
    was_full: bool = False


@dataclass
class ConcurrencyLimit:
    """The limit of requests in progress. `fixed`: the limit, if it does not adapt."""

    fixed: int | None = None
    limit: int = field(default=FIRST_LIMIT)
    phase: LimitPhase = LimitPhase.GROW
    _epoch: _Epoch = field(default_factory=lambda: _Epoch(0.0))
    _rate: float = 0.0
    """Work per second of the last epoch before the present trial."""
    _former_limit: int = FIRST_LIMIT
    _num_held: int = 0
    _tries_higher: bool = False
    _last_cut_s: float = -CUT_INTERVAL_S
    _can_cut: bool = True
    """False if no request has finished since the last cut."""

    def __post_init__(self) -> None:
        self.limit = self.fixed or self.limit

    def sent(self, num_in_progress: int, *, now_s: float) -> None:
        """Called when a request is sent, with the number of requests in progress."""
        if not self._epoch.start_s:
            self._epoch = _Epoch(now_s)
        self._epoch.was_full |= num_in_progress >= self.limit

    def finished(self, work: float, *, now_s: float) -> None:
        """Called when a request has a result. `work`: number of its tokens, or 1 if it is not known."""
        epoch, self._can_cut = self._epoch, True
        epoch.num_finished += 1
        epoch.work += work
        elapsed_s = now_s - epoch.start_s
        if self.fixed is not None or epoch.num_finished < self.limit or elapsed_s < MIN_EPOCH_S:
            return
        if epoch.was_full:
            self._compare(epoch.work / elapsed_s)
        self._epoch = _Epoch(now_s)

    def refused(self, *, now_s: float) -> None:
        """Called when the server has refused a request because of its load."""
        if self.fixed is not None or not self._can_cut or now_s - self._last_cut_s < CUT_INTERVAL_S:
            return
        self.limit = max(1, self.limit // 2)
        self.phase, self._num_held, self._tries_higher = LimitPhase.HOLD, 0, False
        self._last_cut_s, self._rate, self._can_cut = now_s, 0.0, False
        self._epoch = _Epoch(now_s)

    def _compare(self, rate: float) -> None:
        """Chooses the next limit after an epoch with this rate."""
        match self.phase:
            case LimitPhase.GROW if rate >= self._rate * GAIN and self.limit < MAX_LIMIT:
                self._try(min(2 * self.limit, MAX_LIMIT), LimitPhase.GROW, rate=rate)
            case LimitPhase.GROW:
                self._hold(rate, limit=self.limit if rate > self._rate else self._former_limit)
            case LimitPhase.TRY_HIGHER if rate >= self._rate * GAIN and self.limit < MAX_LIMIT:
                self._try(min(2 * self.limit, MAX_LIMIT), LimitPhase.GROW, rate=rate)
            case LimitPhase.TRY_HIGHER:
                self._hold(rate, limit=self._former_limit)
            case LimitPhase.TRY_LOWER:
                self._hold(rate, limit=self.limit if rate >= self._rate * LOSS else self._former_limit)
            case LimitPhase.HOLD:
                self._rate = rate
                self._num_held += 1
                if self._num_held >= HOLD_EPOCHS:
                    self._try_other(rate)

    def _try_other(self, rate: float) -> None:
        self._tries_higher = not self._tries_higher
        if self._tries_higher:
            self._try(min(int(self.limit * HIGHER) + 1, MAX_LIMIT), LimitPhase.TRY_HIGHER, rate=rate)
        else:
            self._try(max(int(self.limit * LOWER), 1), LimitPhase.TRY_LOWER, rate=rate)

    def _try(self, limit: int, phase: LimitPhase, *, rate: float) -> None:
        self._former_limit, self._rate = self.limit, rate
        self.limit, self.phase = limit, phase

    def _hold(self, rate: float, *, limit: int) -> None:
        self.limit, self.phase = limit, LimitPhase.HOLD
        self._rate, self._num_held = rate, 0
