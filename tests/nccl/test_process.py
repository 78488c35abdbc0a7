"""The receiver process ends when its server closes its standard input, even while it waits for a trainer."""

import socket
import subprocess
import sys

import msgspec
import pytest

from motet.engines.native.spawn import RECEIVER
from motet.models.trainer_group import JoinGroup, TrainerGroup
from motet.settings.server_config import environment
from tests.nccl.library import fake_nccl

pytestmark = pytest.mark.slow


def test_a_process_that_waits_for_a_trainer_ends_with_its_standard_input(
    tmp_path_factory: pytest.TempPathFactory,
) -> None:
    library = fake_nccl(tmp_path_factory.mktemp("nccl"))
    with socket.create_server(("127.0.0.1", 0)) as silent_store:
        address, port = silent_store.getsockname()
        group = TrainerGroup(
            rank=1, world_size=2, master_address=address, master_port=port, packed=True, buffer_bytes=1, num_buffers=1
        )
        order = msgspec.json.encode(JoinGroup(group, "cpu", library, 300.0)) + b"\n"
        command = [sys.executable, "-m", RECEIVER]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment()) as process:
            assert process.stdin is not None and process.stdout is not None
            process.stdin.write(order)
            process.stdin.flush()
            connection, _ = silent_store.accept()
            with connection:
                assert connection.recv(1), "the receiver waits for a response of this store"
                process.stdin.close()
                assert process.wait() == 0
                assert process.stdout.read() == b""
