"""The capacity of workers for groups that wait: free capacity (`have_capacity`), and the capacity for the groups of one
client if no worker has free capacity (`ClientCapacity`). Pure: reads only the workers' loads."""

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from motet.engine_info import EngineInfo
from motet.routing.choosing.cost import can_start, can_start_in_share, can_start_partially
from motet.routing.choosing.survey import COMPARE_ALL
from motet.routing.workers.member import Member
from motet.routing.workers.worker_share import WaitingWeights, WorkerShare
from motet.types import GenerateRequest


def have_capacity(
    members: Iterable[Member], *, choices: int, largest_part: int, prompt_tokens: int, choices_prefilling: int
) -> bool:
    """Returns True if the workers could start the group at once.

    `members`: the workers that may get it. `largest_part`: maximum number of choices that one worker must take.
    `choices_prefilling`: number of admitted choices that are not in the load of any worker yet.

    A worker that has just refused a group has no capacity. An idle worker takes a group of any size. For any other
    worker `can_start` decides. A group that is split into parts also needs capacity for all its choices
    together."""
    fits, busy, free_choices = False, choices_prefilling > 0, -choices_prefilling
    one_part = largest_part >= choices
    for member in members:
        if member.worker is None or member.faults.refused:
            continue
        info, load = member.worker.engine.info, member.load
        open_choices = load.open_choices
        fits = (
            fits
            or not open_choices
            or can_start(
                open_choices=open_choices,
                max_choices=info.max_num_seqs,
                held_blocks=load.trunk_blocks + load.tail_blocks,
                num_blocks=info.num_blocks,
                choices=largest_part,
                prompt_blocks=_prompt_blocks(prompt_tokens, info),
            )
        )
        busy = busy or open_choices > 0
        free_choices += max(0, info.max_num_seqs - open_choices)
        if fits and (free_choices >= choices or (one_part and not choices_prefilling)):
            return True
    return fits and not busy


class CapacityCache:
    """Remembers the sizes of groups for which there was no capacity in one iteration of the event loop: within it,
    capacity only decreases. If a group did not fit, a group with at least as many choices and prompt tokens does not
    fit either. So the time for a long queue grows with the number of different group sizes in it."""

    def __init__(self) -> None:
        self._too_large: list[tuple[int, int]] = []
        """The smallest sizes that did not fit. None of them is at least as large as another in both numbers."""

    def fits(self, choices: int, prompt_tokens: int, *, has_capacity: Callable[[int, int], bool]) -> bool:
        """`has_capacity`: takes a number of choices and a number of prompt tokens."""
        if any(choices >= size[0] and prompt_tokens >= size[1] for size in self._too_large):
            return False
        if has_capacity(choices, prompt_tokens):
            return True
        larger = [size for size in self._too_large if size[0] >= choices and size[1] >= prompt_tokens]
        self._too_large = [*(size for size in self._too_large if size not in larger), (choices, prompt_tokens)]
        return False


class ClientCapacity:
    """Decides which groups can start on workers without free capacity, in one round of admission."""

    def __init__(self, members: Sequence[Member], weights: WaitingWeights, *, round_number: int) -> None:
        """`members`: the workers that may get the groups. If there are more than `COMPARE_ALL`, each round checks other
        workers, which depend on `round_number`."""
        count = len(members)
        window = [members[(round_number * COMPARE_ALL + step) % count] for step in range(min(count, COMPARE_ALL))]
        self._members = [(m, m.worker.engine.info) for m in window if m.worker is not None and not m.faults.refused]
        self._weights = weights
        self._in_share = defaultdict[object, CapacityCache](CapacityCache)
        self._fits_partially = defaultdict[object, CapacityCache](CapacityCache)

    def in_share(self, request: GenerateRequest, choices: int, *, prefilling: int) -> bool:
        """Returns True if the client stays within its share of a worker with this number of choices of the group.
        `prefilling`: number of the client's admitted choices that are not in the load of any worker yet."""

        def has_capacity(choices: int, prompt_tokens: int) -> bool:
            return any(
                can_start_in_share(
                    self._share(request, member, prefilling=prefilling),
                    max_choices=info.max_num_seqs,
                    num_blocks=info.num_blocks,
                    choices=choices,
                    prompt_blocks=_prompt_blocks(prompt_tokens, info),
                )
                for member, info in self._members
            )

        cache = self._in_share[self._cache_key(request, prefilling=prefilling)]
        return cache.fits(choices, len(request.prompt), has_capacity=has_capacity)

    def fits_partially(self, request: GenerateRequest, choices: int) -> bool:
        """Returns True if the group could start on a worker that cannot run all its choices at once."""

        def has_capacity(choices: int, prompt_tokens: int) -> bool:
            return any(
                can_start_partially(
                    self._share(request, member),
                    open_choices=member.load.open_choices,
                    max_choices=info.max_num_seqs,
                    held_blocks=member.load.trunk_blocks + member.load.tail_blocks,
                    num_blocks=info.num_blocks,
                    choices=choices,
                    prompt_blocks=_prompt_blocks(prompt_tokens, info),
                )
                for member, info in self._members
            )

        cache = self._fits_partially[self._cache_key(request)]
        return cache.fits(choices, len(request.prompt), has_capacity=has_capacity)

    def _share(self, request: GenerateRequest, member: Member, *, prefilling: int = 0) -> WorkerShare:
        share = self._weights.share_of(request.client, request.client_weight, member=member)
        return replace(share, open_choices=share.open_choices + prefilling) if prefilling else share

    def _cache_key(self, request: GenerateRequest, *, prefilling: int = 0) -> object:
        """Returns the key of the client's `CapacityCache`. All clients with one weight that hold nothing have the same
        capacity, and one key."""
        client = request.client
        holds = prefilling or any(client in member.load.clients for member, _ in self._members)
        return client if holds else request.client_weight


def _prompt_blocks(prompt_tokens: int, info: EngineInfo) -> int:
    return -(-prompt_tokens // info.block_size)
