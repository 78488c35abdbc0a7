"""Trainers and receivers of tensors over NCCL agree on the id of the group, the limits of packed broadcasts, and NCCL's
functions. The tests use a library that sends bytes through sockets."""

import os
import pickle  # noqa: TID251  what vLLM's trainers put into their stores
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load

from motet.engines.native.cuda.nccl import Communicator, Nccl, NcclError, id_in, join
from motet.engines.native.cuda.receive import Broadcast, broadcasts_of
from motet.models.checkpoint import TensorFacts, safetensors_header
from motet.models.trainer_group import TrainerGroup
from tests.nccl.library import fake_nccl
from tests.nccl.trainer import Plan, Root, ncclUniqueId, packed

ID = bytes(range(128))
VLLM_START = (
    b"\x80\x04\x95\xec\x00\x00\x00\x00\x00\x00\x00\x8c\x07_ctypes\x94\x8c\t_unpickle\x94\x93\x94\x8c4"
    b"vllm.distributed.device_communicators.pynccl_wrapper\x94\x8c\x0cncclUniqueId\x94\x93\x94}\x94C\x80"
)
VLLM_END = b"\x94\x86\x94\x86\x94R\x94."
"""The bytes before and after the 128 bytes of the id in the store of a trainer with vLLM 0.32."""
DTYPES = {torch.bfloat16: "BF16", torch.float16: "F16", torch.float32: "F32"}
TENSORS = {
    "a": torch.arange(6, dtype=torch.float32).view(2, 3),
    "b": torch.ones(5, dtype=torch.bfloat16),
    "c": torch.tensor(3.0, dtype=torch.float16),
    "d": torch.zeros(40, dtype=torch.float32),
    "e": torch.ones(7, dtype=torch.bfloat16),
}
FACTS = [TensorFacts(name, DTYPES[tensor.dtype], tuple(tensor.shape)) for name, tensor in TENSORS.items()]


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> str:
    return fake_nccl(tmp_path_factory.mktemp("nccl"))


def group(*, packed: bool = True, buffer_bytes: int = 2**30, unique_id: bytes = ID) -> TrainerGroup:
    return TrainerGroup(
        rank=1, world_size=2, packed=packed, buffer_bytes=buffer_bytes, num_buffers=2, unique_id=unique_id
    )


def test_the_id_of_a_group_is_found_in_the_pickle_of_any_wrapper() -> None:
    assert id_in(VLLM_START + ID + VLLM_END) == ID
    for protocol in (4, 5):
        assert id_in(pickle.dumps(ncclUniqueId.from_buffer_copy(ID), protocol)) == ID


class Evil:
    """Runs a command in the process that loads it."""

    def __init__(self, file: Path) -> None:
        self._file = file

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.mkdir, (str(self._file),)


def test_a_pickle_without_an_id_is_refused_and_nothing_in_it_is_run(tmp_path: Path) -> None:
    wrong = [pickle.dumps(Evil(tmp_path / "run")), pickle.dumps(ID), pickle.dumps(["ncclUniqueId", ID[1:]]), b"", ID]
    for data in wrong:
        with pytest.raises(NcclError, match="does not have the id of a group"):
            id_in(data)
    assert not (tmp_path / "run").exists()
    assert id_in(pickle.dumps(["ncclUniqueId", ID])) == ID


@pytest.mark.parametrize("buffer_bytes", [1, 10, 23, 24, 33, 34, 35, 36, 195, 196, 209, 210, 1000])
def test_both_sides_cut_at_the_same_tensors_whatever_the_size_of_a_buffer(buffer_bytes: int) -> None:
    sent = list(packed(TENSORS.values(), buffer_bytes=buffer_bytes))
    expected = [*broadcasts_of(FACTS, group(buffer_bytes=buffer_bytes))]
    assert [piece.num_bytes for piece in expected] == [one.nbytes for one in sent]
    assert {piece.dtype for piece in expected} == {torch.uint8}
    all_bytes = b"".join(one.numpy().tobytes() for one in sent)
    assert len(all_bytes) == sum(fact.num_bytes for fact in FACTS) == 210


def test_without_packing_each_tensor_is_sent_alone_in_its_own_dtype() -> None:
    assert [*broadcasts_of(FACTS, group(packed=False))] == [
        Broadcast(one.numel(), one.dtype) for one in TENSORS.values()
    ]


def test_a_header_with_the_bytes_after_it_is_a_file_that_safetensors_reads() -> None:
    body = b"".join(one.numpy().tobytes() for one in packed(TENSORS.values(), buffer_bytes=50))
    loaded = load(safetensors_header(FACTS) + body)
    assert {*loaded} == {*TENSORS}
    assert all(torch.equal(loaded[name], tensor) for name, tensor in TENSORS.items())


def met(library: str) -> tuple[Root, Communicator]:
    """Returns both ranks of a group, in this process."""
    root = Root(Plan("", library, []))
    with ThreadPoolExecutor(1) as other:
        meeting = other.submit(root.meet)
        receiver = join(group(unique_id=bytes(root.id.internal)), None, nccl=Nccl(library), device=torch.device("cpu"))
        meeting.result()
    return root, receiver


@pytest.mark.parametrize("name", list(TENSORS))
def test_a_broadcast_delivers_the_bytes_of_each_dtype(library: str, name: str) -> None:
    root, receiver = met(library)
    sent = TENSORS[name]
    came = torch.full_like(sent, 77.0)
    sending = threading.Thread(target=root.broadcast, args=(sent,))
    sending.start()
    receiver.broadcast(came, None)
    sending.join()
    assert torch.equal(came, sent)
    receiver.check()


def test_the_message_of_nccl_is_passed_on(library: str) -> None:
    root, receiver = met(library)
    sending = threading.Thread(target=root.broadcast, args=(torch.zeros(3),))
    sending.start()
    with pytest.raises(NcclError, match="ncclBroadcast failed: sizes differ"):
        receiver.broadcast(torch.zeros(4), None)
    sending.join()
    with pytest.raises(NcclError, match=r"NCCL cannot be used: .*no such library"):
        Nccl("/no such library")
    with pytest.raises(NcclError, match=r"NCCL cannot be used: .*ncclCommInitRank"):
        Nccl("libc.so.6")
