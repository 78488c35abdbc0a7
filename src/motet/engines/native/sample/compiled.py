"""Top-k, top-p and min-p by the compiled kernels: one pass over a lane finds the tokens that can be kept, and the last
one kept is found among these without sorting (`csrc/filters.h`). On the CPU only."""

import ctypes

import torch

from motet.engines.native.cpu.library import Filtering, library
from motet.engines.native.sample.candidates import masses
from motet.engines.native.sample.filters import Filters, TorchFilters
from motet.engines.native.sample.lanes import LaneParams, at_temperature


def filters_for(vocab_size: int, device: torch.device) -> Filters:
    """Returns the compiled filters if they can be used, else torch's; both draw the same tokens."""
    kernels = library() if device.type == "cpu" else None
    return TorchFilters(vocab_size) if kernels is None else CompiledFilters(vocab_size, kernels)


class CompiledFilters:
    """Filters with the compiled kernels. They look at the whole lane at once, so no lane is drawn again."""

    def __init__(self, vocab_size: int, kernels: ctypes.CDLL) -> None:
        self.widths = (vocab_size,)
        self._vocab_size = vocab_size
        self._filter = kernels.motet_filter

    def draw(
        self,
        x: torch.Tensor,
        settings: LaneParams,
        *,
        k: int,
        lanes: torch.Tensor,
        uniform: torch.Tensor,
        spare: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        token_ids, _ = self._run(x, settings, lanes=lanes, uniform=uniform, spare=spare)
        return token_ids, torch.ones_like(token_ids, dtype=torch.bool)

    def keep(self, x: torch.Tensor, settings: LaneParams, *, k: int, spare: torch.Tensor) -> None:
        none = torch.empty(0, dtype=torch.int64)
        _, (last_logit, last_id) = self._run(x, settings, lanes=none, uniform=none.double(), spare=spare)
        dropped = (x < last_logit) | ((x == last_logit) & (torch.arange(x.shape[1]) > last_id))
        at_temperature(x, settings)
        x.masked_fill_(dropped, -torch.inf)

    def _run(
        self,
        x: torch.Tensor,
        settings: LaneParams,
        *,
        lanes: torch.Tensor,
        uniform: torch.Tensor,
        spare: torch.Tensor,
    ) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Returns the drawn ids [choices] int64, and the last token that top-k and top-p keep, as logits [lanes, 1]
        float32 and ids [lanes, 1] int64; `x` stays as it is."""
        weights = _weights(x, settings, out=spare)
        last = torch.empty(len(x), 1), torch.empty(len(x), 1, dtype=torch.int64)
        token_ids = torch.empty(len(lanes), dtype=torch.int64)
        whole = masses(weights).sum(-1)
        columns = (settings.temperature, settings.top_k, settings.top_p, settings.log_min_p)
        tensors = (x, weights, whole, *(column.contiguous() for column in columns), lanes, uniform, *last, token_ids)
        sizes = (*x.shape, self._vocab_size, len(lanes))
        self._filter(ctypes.byref(Filtering(*sizes, *(tensor.data_ptr() for tensor in tensors))))
        return token_ids, last


def _weights(x: torch.Tensor, settings: LaneParams, *, out: torch.Tensor) -> torch.Tensor:
    """Writes what `softmax` makes of `x` without min-p, with the same bits, into `out`, and leaves `x` as it is: once
    divided by a temperature, two logits that differ may be equal."""
    if settings.all_plain:
        return torch.softmax(x, -1, out=out)
    torch.sub(x, x.amax(-1, keepdim=True), out=out).div_(settings.temperature)
    return torch.softmax(out, -1, out=out)
