"""The settings of a model and of an engine, declared in the manner of `motet.settings.server_config`."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from motet.log import LogFormat
from motet.sampling_defaults import AUTO, read_override
from motet.settings.declaration import (
    EVERY,
    GATEWAY,
    NOT_BLANK,
    ONE_ADDRESS,
    PORT,
    RAY,
    SERVE,
    Mark,
    Panel,
    common,
    setting,
)
from motet.settings.named_adapter import check_adapters
from motet.types import Role

MAX_THREADS: Final = 1024


@dataclass(frozen=True, kw_only=True)
class ModelConfig:
    """The model, and files that replace the model's own."""

    model: str = setting(
        "smollm2",
        "Model to serve: a local folder, a GGUF file, a Hugging Face model (org/name) or smollm2.",
        pattern=NOT_BLANK,
        must="a folder or the name of a model",
    )
    served_model_name: str | None = common(
        None,
        "Name of the model in requests.",
        commands=EVERY,
        unset="MODEL as given",
        differs={GATEWAY: {"help": "Name of its first model in requests.", "unset": "the name that workers report"}},
        pattern=NOT_BLANK,
        must="not empty",
    )
    revision: str | None = setting(
        None, "Branch, tag or commit of the model on the Hugging Face Hub.", unset="the main branch"
    )
    tokenizer: str | None = setting(
        None,
        "Folder or Hub name of another tokenizer.",
        commands=EVERY,
        unset="the model's tokenizer",
        differs={GATEWAY: {"help": "Tokenizer of models without --tokenizer-of.", "unset": "the workers' tokenizer"}},
    )
    chat_template: str | None = common(
        None,
        "File with another chat template (Jinja).",
        unit="file",
        commands=EVERY,
        unset="the model's chat template",
    )
    generation_config: str = setting(
        AUTO,
        "Defaults of sampling fields: auto takes the model's generation_config.json, none takes none, and a folder has "
        "another generation_config.json, also for end tokens.",
        commands=EVERY,
        differs={
            GATEWAY: {
                "help": "Defaults of sampling fields: auto takes the workers', none takes none, and a folder has a "
                "generation_config.json for all models."
            }
        },
        pattern=NOT_BLANK,
        must="auto, none or a folder",
    )
    override_generation_config: str | None = setting(
        None,
        "Values that replace the defaults of sampling fields, as a JSON object; null removes one.",
        commands=EVERY,
        unit="JSON",
        unset="none",
        read=read_override,
    )
    tool_parser: str = common(
        "auto", "Format of tool calls: a name, none, or auto, which detects it from the chat template.", commands=EVERY
    )
    reasoning_parser: str = common(
        "auto", "Format of reasoning: a name, none, or auto, which detects it from the chat template.", commands=EVERY
    )


@dataclass(frozen=True, kw_only=True)
class EngineConfig:
    """All settings of an engine process, which receives them as one message."""

    model_path: str
    """Local folder in Hugging Face's layout, found or made by `motet.models`."""
    model_name: str
    model_root: str = ""
    """Name on the hub or path that the model was loaded from."""
    tokenizer_path: str = ""
    """Folder of the tokenizer, which grammars need; empty for `model_path`."""
    generation_path: str = ""
    """Folder of the `generation_config.json` with the end tokens; empty for `model_path`."""
    default_sampling_params: Mapping[str, int | float] = field(default_factory=dict)
    """Values of sampling fields that requests omit, which the engine reports."""
    available_bytes: int | None = None
    """Available memory when the server started. None means that the engine reads it when it starts."""
    num_engines: int = 1
    """Number of engines that share the machine's memory."""
    log_format: str = LogFormat.TEXT
    log_level: str = "info"
    device: str = common(
        "auto",
        "Device of the model: cpu, cuda, cuda:K, or auto, which takes the first GPU, or the CPU if there is none.",
        pattern=r"auto|cpu|cuda|cuda:\d+",
        must="auto, cpu, cuda or cuda:K",
    )
    dtype: str = common(
        "auto",
        "Data type of weights and KV cache; auto takes the checkpoint's. On a CPU float16 has no compiled kernels.",
        choices=("auto", "bfloat16", "float16", "float32"),
    )
    max_model_len: int | None = common(
        None,
        "Maximum length of a prompt and its output together.",
        unit="tokens",
        unset="the model's maximum, or its original length with LongRoPE",
        minimum=2,
        reason="it holds a prompt and an output",
    )
    kv_cache_gb: float | None = common(
        None,
        "Memory for the KV cache of one engine.",
        unit="GiB",
        unset="2 GiB; on a CPU with little memory, less, so that weights and caches of all engines fit",
        above=0,
    )
    gpu_memory_utilization: float | None = setting(
        None, "Fraction of a GPU's memory for the engine, weights included; replaces --kv-cache-gb.", above=0, maximum=1
    )
    block_size: int = setting(16, "Number of tokens in a KV block.", unit="tokens", choices=(8, 16, 32, 64, 128))
    max_num_seqs: int = common(
        256, "Maximum number of choices that one engine runs at once, and maximum size of a group.", minimum=1
    )
    max_num_batched_tokens: int = setting(
        512, "Maximum tokens of a step: one for each running choice, the rest for prompts.", unit="tokens", minimum=1
    )
    kernels: str = setting(
        "auto",
        "Kernels on the CPU: compiled (C++; bfloat16 and float32), torch, or auto, the first that works.",
        choices=("auto", "compiled", "torch"),
    )
    quantization: str = common(
        "none",
        "Weight quantization; int8 uses 8 bits with one scale per column and needs the compiled kernels.",
        choices=("none", "int8"),
    )
    prefix_cache: bool = setting(True, "Reuse the KV of earlier prompts with the same prefix.")
    keep_gb: float | None = setting(
        None,
        "Maximum memory for prompts that one engine keeps for more choices (keep_s).",
        unit="GiB",
        unset="half of the cache",
        minimum=0,
        zero="none is kept",
    )
    cache_answers: bool = setting(
        False,
        "Also keep the KV of output tokens in the prefix cache. Saves prefill in conversations, but makes an answer "
        "depend on earlier requests.",
    )
    adapters: tuple[str, ...] = setting(
        (),
        "LoRA adapter to load at the start, as NAME=FOLDER (PEFT); requests select it by its name. Repeatable.",
        unit="name=folder",
        unset="none",
        read=check_adapters,
    )
    max_adapters: int = setting(
        64, "Maximum number of loaded adapters; others can be loaded at run time.", minimum=0, maximum=1024, zero="none"
    )
    max_adapter_rank: int = setting(64, "Maximum rank of an adapter.", minimum=1, maximum=1024)
    draft_tokens: int = setting(
        8,
        "Maximum number of draft tokens of a choice in a step, predicted from its prompt and siblings; CPU only.",
        minimum=0,
        maximum=64,
    )
    draft_from_history: int = setting(
        0, "Number of earlier output tokens that an engine keeps as drafts for equal prompts.", minimum=0, zero="none"
    )
    num_threads: int | None = setting(
        None,
        "Number of CPU threads of one engine.",
        flag="--threads",
        unset="all cores, divided evenly among the engines of a cell",
        differs={RAY: {"unset": "--cpus-per-worker"}},
        minimum=1,
        maximum=MAX_THREADS,
        reason="more threads than cores only wait for each other",
    )
    enforce_eager: bool = setting(False, "Disable CUDA graphs and launch every operator separately.")
    role: Role = common(
        Role.BOTH,
        "Role of this server: prefill provides the KV of prompts, decode fetches it, both does everything itself.",
        panel=Panel.CELL,
        commands=SERVE,
    )
    side_channel_host: str = setting(
        "127.0.0.1",
        "Address at which other workers reach this one.",
        panel=Panel.CELL,
        differs={RAY: {"default": None, "unset": "the address of the replica's node"}},
        pattern=ONE_ADDRESS,
        must="one address at which other workers reach this one",
        reason="tickets contain it",
        marks=Mark.THIS_MACHINE,
    )
    side_channel_port: int | None = setting(
        None,
        "Port at which other workers reach this one.",
        panel=Panel.CELL,
        commands=SERVE,
        unset="20000 for a prefill server, 22000 for a decode server, any free port in a cell",
        **PORT,
    )
    kv_transfer_backend: str = setting(
        "auto",
        "What moves KV between workers: nixl, shared-memory (all on one machine), or auto, the first that works.",
        panel=Panel.CELL,
        choices=("auto", "nixl", "shared-memory"),
    )
    cluster_key: str = setting(
        "",
        "Shared secret of the workers; others are refused. Set it in the environment: the command line is public.",
        panel=Panel.CELL,
        unset="none; a cell generates one",
        differs={RAY: {"unset": "a random key"}},
        pattern=r"(?!\s+$)[\s\S]*",
        must="not blank",
        marks=Mark.SECRET,
    )
    lease_s: float = setting(
        60.0,
        "Time for which prefilled KV is kept without a heartbeat from its reader.",
        panel=Panel.CELL,
        minimum=3,
        reason="a reader sends a heartbeat every second",
    )
    pull_timeout_s: float = setting(
        10.0, "Time after which decode stops waiting for a prompt's KV and computes it.", panel=Panel.CELL, above=0
    )
    heartbeat_timeout_s: float = setting(
        10.0,
        "Time without a heartbeat after which an engine process is killed.",
        panel=Panel.PROCESS,
        minimum=1,
        reason="heartbeats are late on a busy machine",
    )
    step_timeout_s: float = setting(
        300.0, "Maximum time of one step, after which an engine process is killed.", panel=Panel.PROCESS, above=0
    )
