"""The driver of a group's policy, for groups of tokens (`text.text_group`) and of texts (`api.texts`).

    step ──► PolicyDriver.step ──► Steering ──► SteeringDecision ──► the group ends, starts and drops choices
    end_choice by the client ──► withdraw, cancel

The group passes the outputs of each step to the driver, and carries out the decision. A choice that the client ends is
part of the decision after the next step. Without a policy, a driver decides nothing else.
"""

from collections.abc import Iterable, Sequence
from functools import partial
from operator import attrgetter

import msgspec

from motet.loop_budget import within_loop_budget
from motet.policies.steering import NO_CHANGE, GroupPolicy, GroupReport, Steering, SteeringDecision
from motet.types import FinishReason, TokenLogprob

_INDEX = attrgetter("index")


class ChoiceOutput(msgspec.Struct, frozen=True, gc=False):
    """New output of one choice in a step. A step can have several outputs of one choice."""

    index: int
    text: str = ""
    """Next text of the answer, without reasoning and tool calls. Read only if `PolicyDriver.reads_answers`."""
    finish: FinishReason | None = None
    logprobs: Sequence[TokenLogprob] = ()
    """Log-probabilities of new tokens."""
    num_tokens: int = 0
    """Length of the choice including these tokens, if `logprobs` is not empty."""


class PolicyDriver:
    """The choices of one group that have not ended, and the policy that decides on them."""

    def __init__(self, policy: GroupPolicy | None, indices: Sequence[int]) -> None:
        """`indices`: indices of the choices, in the order in which they start."""
        self._steering = None if policy is None else Steering(policy, indices)
        self.reads_answers = policy is not None and policy.reads_answers
        """True if steps need the texts of the answers."""
        self.reads_logprobs = policy is not None and policy.confidence is not None
        """True if steps need the log-probabilities of the tokens."""
        self.unfinished = set(indices)
        """Choices that wait or run. Changes only in `step`, `finished`, `withdraw` and `withdraw_all`."""
        self._cancelled: set[int] = set()
        """Running choices that the client has ended since the last step."""
        self.active = policy is not None
        """True if the next step must be passed to `step`: there is a policy, or the client has ended a choice."""

    @property
    def waiting(self) -> frozenset[int]:
        """Choices that have not started yet."""
        return frozenset() if self._steering is None else self._steering.waiting

    @property
    def cancelled(self) -> frozenset[int]:
        """Running choices that the client has ended, and whose end has not been reported yet."""
        return frozenset(self._cancelled)

    async def step(self, outputs: Sequence[ChoiceOutput]) -> SteeringDecision:
        """Returns the decision after a step. Its `abort` also contains the choices that the client has ended."""
        if self._steering is not None and self.reads_answers:
            await self._add_texts(self._steering, outputs)
        finished = [output for output in sorted(outputs, key=_INDEX) if output.finish is not None]
        cancelled = self._take_cancelled(finished) if self._cancelled else ()
        if self._steering is None:
            decision = SteeringDecision(cancelled)
        else:
            decision = self._decide(self._steering, outputs, finished=finished, cancelled=cancelled)
        if finished or decision is not NO_CHANGE:
            self.unfinished.difference_update([output.index for output in finished], decision.abort, decision.drop)
        return decision

    def finished(self, indices: Iterable[int]) -> None:
        """Records choices that have ended, after a step that was not passed to `step`."""
        self.unfinished.difference_update(indices)

    def withdraw(self, index: int) -> bool:
        """Ends a waiting choice at the client's request. Returns False if the choice is not waiting."""
        if self._steering is None or not self._steering.withdraw(index):
            return False
        self.unfinished.discard(index)
        return True

    def withdraw_all(self) -> None:
        """Ends all choices that wait."""
        if self._steering is not None:
            self.unfinished.difference_update(self._steering.withdraw_all())

    def cancel(self, index: int) -> bool:
        """Ends a running choice at the client's request. Returns False if it is not running, or already cancelled."""
        if index not in self.unfinished or index in self._cancelled:
            return False
        self._cancelled.add(index)
        self.active = True
        return True

    def report(self, id: str) -> GroupReport | None:
        """Returns the report on the group, by its name; None without a policy."""
        return None if self._steering is None else self._steering.report(id)

    async def _add_texts(self, steering: Steering, outputs: Sequence[ChoiceOutput]) -> None:
        """Adds the texts of a step, and finds the values of complete answers. All groups share the time for values in
        an iteration of the event loop: a pattern can take milliseconds, and hundreds of groups can end at once."""
        for output in outputs:
            steering.add_text(output.index, output.text)
            if output.finish is not None:
                await within_loop_budget(partial(steering.find_value, output.index))

    def _decide(
        self,
        steering: Steering,
        outputs: Sequence[ChoiceOutput],
        *,
        finished: Sequence[ChoiceOutput],
        cancelled: tuple[int, ...],
    ) -> SteeringDecision:
        if self.reads_logprobs:
            for output in outputs:
                if output.logprobs and output.index in self.unfinished:
                    steering.add_logprobs(output.index, output.logprobs, num_tokens=output.num_tokens)
        for output in finished:
            steering.end(output.index, output.finish)
        for index in cancelled:
            steering.end(index, None)
        decision = steering.decide()
        return decision._replace(abort=(*cancelled, *decision.abort)) if cancelled else decision

    def _take_cancelled(self, finished: Sequence[ChoiceOutput]) -> tuple[int, ...]:
        """Returns the choices that the client has ended, except choices that have finished in the same step."""
        cancelled = tuple(sorted(self._cancelled.difference(output.index for output in finished)))
        self._cancelled.clear()
        self.active = self._steering is not None
        return cancelled
