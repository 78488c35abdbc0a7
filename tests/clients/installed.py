"""The tested clients with their versions, and the environments that they are installed in.

An environment is made once and kept in the cache folder. Its name has a digest of its packages and the interpreter, so
that a change of either makes a new environment. Dependencies of a client have no versions here: pip and npm choose the
newest that it supports.
"""

import hashlib
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
from filelock import FileLock

from motet.settings.server_config import cache_folder, environment

SCRIPTS = Path(__file__).parent / "scripts"
INSTALL_TIMEOUT_S = 900


@dataclass(frozen=True)
class Client:
    """A client, its script, and the packages that the script needs."""

    name: str
    """The name in docs/clients.md."""
    script: str
    """The file in `scripts` that uses it, if it is a library. A script with .mjs runs in node, with packages from
    npm."""
    packages: tuple[str, ...]
    """The client with its exact version, then further packages that the script needs."""

    @property
    def key(self) -> str:
        """The name of its recording."""
        return self.script.partition(".")[0]

    @property
    def version(self) -> str:
        """The version of the client itself."""
        return self.packages[0].replace("==", "@").rpartition("@")[2]

    @property
    def _interpreter(self) -> str:
        """The Python of the environment: with another one, its packages cannot be imported. Empty for node."""
        return "" if self.script.endswith(".mjs") else f"{sys.executable} {sys.version}"

    def installed(self) -> Path:
        """Installs the client if needed, and returns its folder. Skips the test if it cannot be installed."""
        digest = hashlib.sha256(" ".join((*self.packages, self._interpreter)).encode()).hexdigest()[:8]
        folder = cache_folder(environment()) / "clients" / f"{self.key}-{digest}"
        folder.parent.mkdir(parents=True, exist_ok=True)
        with FileLock(f"{folder}.lock"):
            if not (folder / "ready").exists():
                self._install(folder)
                (folder / "ready").touch()
        return folder

    def _install(self, folder: Path) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        if self.script.endswith(".mjs"):
            if not shutil.which("npm"):
                pytest.skip("there is no npm on this machine")
            folder.mkdir()
            steps = [["npm", "install", "--no-audit", "--no-fund", "--prefix", str(folder), *self.packages]]
        else:
            pip = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet", "--disable-pip-version-check"]
            steps = [[sys.executable, "-m", "venv", str(folder)], [*pip, *self.packages]]
        for step in steps:
            done = subprocess.run(step, capture_output=True, text=True, timeout=INSTALL_TIMEOUT_S, check=False)
            if done.returncode:
                pytest.skip(f"{self.packages[0]} cannot be installed: {done.stderr.strip()[-300:]}")

    def command(self) -> list[str]:
        """Returns the command that runs the script. Its argument is the server's URL."""
        folder = self.installed()
        if not self.script.endswith(".mjs"):
            return [str(folder / "bin" / "python"), str(SCRIPTS / self.script)]
        script = folder / self.script  # node looks for packages in the folder of the script
        shutil.copy(SCRIPTS / self.script, script)
        return ["node", str(script)]


OPENAI = "openai==3.57.0"
LITELLM = Client("LiteLLM", "litellm_turns.py", ("litellm==1.110.2",))
LM_EVAL = Client("lm-eval", "lm_eval_tasks.py", ("lm-eval[api]==0.4.13",))
LM_EVAL_SCORES = "lm_eval_scores.py"
"""A script that runs in the environment of lm-eval, against several servers."""
INSPECT = Client("Inspect", "inspect_epochs.py", ("inspect-ai==0.3.285", OPENAI, "msgspec"))
"""`msgspec` is for Motet's provider, which Inspect imports."""
INSPECT_PROVIDER = "inspect_provider.py"
"""A script that runs in the environment of Inspect, where it finds Motet's provider."""
CODEX = Client("Codex CLI", "codex.mjs", ("@openai/codex@0.169.0",))
CLAUDE_CODE = Client("Claude Code", "claude_code.mjs", ("@anthropic-ai/claude-code@2.1.332",))
AIDER = Client("aider", "aider.py", ("aider-chat==0.86.2",))
"""Like Codex and Claude Code, a program that needs no script. It needs a better model, so the output of its model is
scripted."""
WEIGHTS_PACKAGES = ("filelock", "msgspec", "psutil", "torch==2.13.0")
"""The packages that `motet.weights` imports."""
LLM_PACKAGES = ("filelock", "httpx", "msgspec", "prometheus-client", "psutil", "rich")
"""The packages that `motet.LLM` imports."""
TRL = Client(
    "TRL",
    "trl_client.py",
    ("trl==1.16.0", "peft==0.21.2", "requests", *sorted({*LLM_PACKAGES, *WEIGHTS_PACKAGES})),
)
"""The client of TRL's trainers. It needs a server with `--rl`. The example of a trainer runs in its environment too."""
CLIENTS = (
    Client("openai (Python)", "openai_python.py", (OPENAI,)),
    Client("openai (JavaScript)", "openai_npm.mjs", ("openai@7.57.0",)),
    Client("anthropic (Python)", "anthropic_python.py", ("anthropic==2.14.0",)),
    LITELLM,
    Client("instructor", "instructor_objects.py", ("instructor==1.17.0",)),
    Client("LangChain", "langchain_runs.py", ("langchain-openai==1.7.4",)),
    Client("LlamaIndex", "llama_index_runs.py", ("llama-index-llms-openai-like==0.8.1",)),
    Client("Pydantic AI", "pydantic_ai_agents.py", ("pydantic-ai-slim[openai]==2.68.0",)),
    Client("DSPy", "dspy_runs.py", ("dspy==3.4.1", "litellm==1.110.2")),
    Client("llm", "llm_commands.py", ("llm==0.36",)),
    Client(
        "Vercel AI SDK",
        "vercel_ai.mjs",
        ("ai@7.0.173", "@ai-sdk/openai-compatible@3.0.92", "@ai-sdk/openai@4.0.118", "zod"),
    ),
    LM_EVAL,
    INSPECT,
    Client("Haystack", "haystack_runs.py", ("haystack-ai==3.4.1",)),
    Client("smolagents", "smolagents_runs.py", ("smolagents[openai]==1.26.0",)),
    Client("OpenAI Agents SDK", "openai_agents_runs.py", ("openai-agents==0.24.0",)),
    Client("Outlines", "outlines_forms.py", ("outlines[openai]==1.3.3",)),
    Client("TensorZero", "tensorzero_runs.py", ("tensorzero==2026.6.0",)),
    Client("AutoGen", "autogen_agents.py", ("autogen-ext[openai]==0.7.5", "autogen-agentchat==0.7.5")),
    Client("Curator", "curator_rows.py", ("bespokelabs-curator==0.1.31",)),
    Client("Semantic Kernel", "semantic_kernel_runs.py", ("semantic-kernel==1.45.0",)),
)
