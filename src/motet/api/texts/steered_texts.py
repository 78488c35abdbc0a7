"""The choices of one prompt on a text upstream, under the policy of their request.

    read ──► SteeredPrompt.feed ──► PolicyDriver ──► end_choice: the request of a choice is closed
             the text of its pieces                  start:      the request of a choice is sent

The pieces of one read are one step of the policy. A choice that Motet ends still has a last piece, which arrives with
the next read."""

from collections.abc import Sequence

from motet.api.known_groups import ChoiceReport, choice_state
from motet.engines.upstream.text_source import TextGroupStream, TextPiece
from motet.policies.driver import ChoiceOutput, PolicyDriver
from motet.policies.steering import GroupPolicy, GroupReport
from motet.types import FinishReason


class SteeredPrompt:
    """An `OpenAnswer` for one prompt. Its choices are numbered from 0, in the request from `first`."""

    def __init__(self, policy: GroupPolicy, stream: TextGroupStream, *, first: int, n: int) -> None:
        self._stream = stream
        self._first = first
        self._n = n
        self._driver = PolicyDriver(policy, range(n))
        self._reasons: dict[int, FinishReason] = {}

    async def feed(self, pieces: Sequence[TextPiece]) -> Sequence[int]:
        """Passes this prompt's pieces to the policy, and ends and starts choices as it decides. Returns the numbers of
        the started choices in the request."""
        driver, outputs = self._driver, []
        for piece in pieces:
            if piece.finish is FinishReason.ABORT:
                continue  # Motet has ended the choice, so the driver knows
            index = piece.index - self._first
            outputs.append(ChoiceOutput(index, piece.text if driver.reads_answers else "", piece.finish))
            if piece.finish is not None:
                self._reasons[index] = piece.finish
        decision = await driver.step(outputs)
        for index in decision.abort:
            self._end(index)
        started = [self._first + index for index in decision.start]
        if started:
            self._stream.start(started)
        return started

    def choices(self) -> Sequence[ChoiceReport]:
        reasons, unfinished, waiting = self._reasons, self._driver.unfinished, self._driver.waiting
        reports = []
        for index in range(self._n):
            state = choice_state(index, ended=reasons, unfinished=unfinished, waiting=waiting)
            reports.append(ChoiceReport(index, state, None, reasons.get(index)))
        return reports

    async def end_choice(self, index: int) -> bool:
        if self._driver.withdraw(index):
            return True
        if index in self._reasons or not self._driver.cancel(index):
            return False
        self._end(index)
        return True

    async def end_all(self) -> None:
        self._driver.withdraw_all()
        for index in range(self._n):
            await self.end_choice(index)

    def report(self, id: str) -> GroupReport | None:
        return self._driver.report(id)

    def _end(self, index: int) -> None:
        """Closes the request of a choice, unless the client has ended the choice before."""
        if index not in self._reasons:
            self._reasons[index] = FinishReason.ABORT
            self._stream.end_choice(self._first + index)
