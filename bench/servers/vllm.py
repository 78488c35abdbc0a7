"""The flags with which vLLM's CPU build is fastest. `folder` is a virtual environment with vLLM."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from motet.settings.server_config import environment

MODEL_NAME = "vllm"


@dataclass(frozen=True)
class VLLMSetup:
    """A `vllm serve` with the settings that are fastest on a CPU."""

    folder: Path
    model: Path
    cores: Sequence[int]
    """Cores to use, with one thread on each."""
    arguments: Sequence[str] = ()
    environ: Mapping[str, str] = field(default_factory=dict)

    @property
    def name(self) -> str:
        return "vLLM"

    def command(self, port: int) -> list[str]:
        serve = [str(self.folder / "bin" / "vllm"), "serve", str(self.model), "--served-model-name", MODEL_NAME]
        shape = ["--max-model-len", "4096", "--dtype", "bfloat16", "--enforce-eager"]
        return ["taskset", "-c", self._cores, *serve, "--port", str(port), *shape, *self.arguments]

    def environment(self) -> dict[str, str]:
        own = {
            "VLLM_CPU_OMP_THREADS_BIND": self._cores,
            "VLLM_CPU_KVCACHE_SPACE": "2",
            "HF_HUB_OFFLINE": "1",
            **self.environ,
        }
        return {**environment(), **own}

    @property
    def _cores(self) -> str:
        return ",".join(map(str, self.cores))
