"""Whether the kernels give equal requests equal bits on this machine, found out by trying at start.

They are made to: every number is summed in one order, whatever stands beside it. A compiler that thought better of that
would show here.
"""

import torch

from motet.engines.native.attention.plan import AttentionPlan, PromptRead
from motet.engines.native.cpu.runner import CpuRunner
from motet.engines.native.inputs import StepInputs
from motet.engines.native.kv.storage import KVStorage

LENGTH = 40
CHUNK = 13


def chunks_agree(runner: CpuRunner, vocab_size: int, storage: KVStorage) -> bool:
    """Whether a prompt in one pass has the bits it has in chunks. Uses the first blocks, and leaves them as they were
    found: empty."""
    num_blocks = -(-LENGTH // storage.block_size)
    if num_blocks > storage.num_blocks:
        return False
    table = list(range(num_blocks))
    tokens = torch.randint(vocab_size, (LENGTH,), generator=torch.Generator().manual_seed(0)).tolist()

    def run(begin: int, end: int) -> torch.Tensor:
        positions, rows = list(range(begin, end)), list(range(end - begin))
        read = PromptRead(0, end - begin, begin, end, table)
        plan = AttentionPlan(0, (read,), (), ())
        inputs = StepInputs(tokens[begin:end], positions, positions, rows, len(rows), [], [], plan)
        return runner.run(inputs).clone()

    whole = run(0, LENGTH)
    parts = [run(begin, min(begin + CHUNK, LENGTH)) for begin in range(0, LENGTH, CHUNK)]
    slots = num_blocks * storage.block_size
    storage.keys[:, :slots], storage.values[:, :slots] = 0, 0
    return torch.equal(torch.cat(parts), whole)
