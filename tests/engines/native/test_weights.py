"""An engine with new weights generates the same as an engine that was started with them, whatever it was doing and
whatever is in its cache. New weights that cannot be used leave it as it was."""

import hashlib
import os
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig

from motet.engines.native.build import Parts, build_parts
from motet.engines.native.core import EngineCore
from motet.engines.native.model_weights import PublishedForm, TensorWeights
from motet.engines.native.weight_loader import StartWeights, WeightLoader
from motet.errors import ModelLoadError, RequestError
from motet.models import file_reading
from motet.models.checkpoint import CheckpointKind
from motet.models.file_reading import FileReading
from motet.system.threads import in_daemon_thread
from motet.transfer.orders import FailureKind
from motet.types import ChoiceStart
from tests.engines.native.cuda.cpu_runner import Repeating, cuda_parts
from tests.engines.native.drive import GroupOutcome, gb_of, group, prompt_of, run, take_step
from tests.engines.native.pair import CorePair, alone, tokens, with_ticket
from tests.pairwise import each_once
from tests.patience import PATIENCE_S
from tests.tiny_engine import engine_config
from tests.tiny_models import FAMILIES, config_of, save_model_of, save_tiny_model

SLOW, KERNELS = pytest.mark.slow, pytest.mark.kernels
KERNEL_NUMBERS = pytest.param({"dtype": "bfloat16"}, marks=KERNELS, id="bfloat16")
NUMBERS = [
    KERNEL_NUMBERS,
    pytest.param({"dtype": "bfloat16", "quantization": "int8"}, marks=[KERNELS, SLOW], id="int8"),
    pytest.param({"dtype": "float32"}, marks=[KERNELS, SLOW], id="float32"),
    pytest.param({"dtype": "float32", "kernels": "torch"}, marks=SLOW, id="float32 by torch"),
]
FILE = "model.safetensors"
PROMPT, N, STEPS = prompt_of(83, 1), 5, 12
VERSION = "7"

Renewed = Callable[..., Path]
Tensors = Mapping[str, torch.Tensor]


@pytest.fixture(scope="module")
def other(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Returns the folder of a family's tiny model with other weights than the model of `tiny`."""
    folders: dict[str, Path] = {}

    def folder(family: str) -> Path:
        if family not in folders:
            folders[family] = save_tiny_model(family, tmp_path_factory.mktemp(family), seed=4)
        return folders[family]

    return folder


def built(folder: Path, numbers: Mapping[str, Any]) -> Parts:
    if numbers.get("device") == "graphs":
        return cuda_parts(folder, recorder=Repeating(), kv_cache_gb=gb_of(128))
    return build_parts(engine_config(folder, kv_cache_gb=gb_of(128), max_num_batched_tokens=48, **numbers))


def core_of(parts: Parts) -> EngineCore:
    return EngineCore(parts.info, parts.runner, options=parts.options)


def renew(core: EngineCore, parts: Parts, folder: Path, version: str = VERSION) -> None:
    prepared = parts.weights.prepare(CheckpointKind.FILES, [folder])
    core.update(parts.weights.applied(prepared, core.info, version=version), prepared.staged.apply)
    core.check()


def drive(core: EngineCore, outcomes: dict[str, GroupOutcome]) -> dict[str, GroupOutcome]:
    while core.busy:
        take_step(core, outcomes)
    assert core.stats().blocks_used == 0
    return outcomes


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "numbers"),
    [
        pytest.param("llama", {"dtype": "bfloat16"}, marks=KERNELS, id="llama-bfloat16"),
        *each_once(
            [pytest.param(family, marks=SLOW, id=family) for family in FAMILIES],
            [*NUMBERS, pytest.param({"device": "graphs"}, marks=SLOW, id="graphs")],
        ),
    ],
)
def test_groups_continue_with_new_weights_as_in_an_engine_started_with_them(
    family: str, numbers: dict[str, Any], tiny: Callable[[str], Path], other: Callable[[str], Path]
) -> None:
    """The prompt and its scores are in the prefix cache. One group generates, one waits for its prompt, and one comes
    afterwards."""
    parts = built(tiny(family), numbers)
    core = core_of(parts)
    run(core, [group("warm", PROMPT, seed=90, prompt_logprobs=1)])
    outcomes = {name: GroupOutcome() for name in ("begun", "waiting")}
    core.submit(group("begun", PROMPT, n=N, seed=50, max_tokens=40, logprobs=1))
    for _ in range(STEPS):
        take_step(core, outcomes)
    core.submit(group("waiting", PROMPT, n=2, seed=70, prompt_logprobs=1))
    written = {index: tuple(tokens) for index, tokens in outcomes["begun"].tokens.items()}
    assert len(written) == N and any(len(tokens) > 2 for tokens in written.values())

    sums = parts.weights.checksums()
    renew(core, parts, other(family))
    drive(core, outcomes)
    after = run(core, [group("after", PROMPT, n=N, seed=50, max_tokens=40)])

    started = built(other(family), numbers)
    assert sums != parts.weights.checksums() == started.weights.checksums()
    fresh = core_of(started)
    starts = [ChoiceStart(i, 50 + i, tokens) for i, tokens in written.items()]
    expected = run(
        fresh,
        [
            group("begun", PROMPT, starts=starts, max_tokens=40, logprobs=1),
            group("waiting", PROMPT, n=2, seed=70, prompt_logprobs=1),
            group("after", PROMPT, n=N, seed=50, max_tokens=40),
        ],
        stagger=60,
    )
    for index, before in written.items():
        rest = outcomes["begun"].tokens[index][len(before) :]
        assert rest == expected["begun"].tokens[index]
        assert outcomes["begun"].logprobs[index][len(before) :] == expected["begun"].logprobs[index]
    assert outcomes["waiting"].tokens == expected["waiting"].tokens
    scores, expected_scores = outcomes["waiting"].prompt, expected["waiting"].prompt
    assert scores is not None and expected_scores is not None and scores.parts
    assert scores.parts == expected_scores.parts
    assert after["after"].tokens == expected["after"].tokens
    assert after["after"].tokens != outcomes["begun"].tokens
    assert (core.info.model_digest, core.info.fingerprint) == (fresh.info.model_digest, fresh.info.fingerprint)
    assert core.info.weight_version == VERSION


@pytest.mark.slow
@pytest.mark.parametrize("numbers", [*NUMBERS, pytest.param({"device": "graphs"}, marks=SLOW, id="graphs")])
def test_checksums_equal_the_trainers_tensors_and_show_which_ones_are_zeros(
    numbers: dict[str, Any], tiny: Callable[[str], Path]
) -> None:
    parts = built(tiny("llama"), numbers)
    sums = parts.weights.checksums()
    tensors = load_file(tiny("llama") / FILE)
    assert sums.keys() == tensors.keys()
    dtype = parts.info.dtype
    if numbers.get("quantization") is None:
        theirs = {name: sha256(tensor.to(getattr(torch, dtype))) for name, tensor in tensors.items()}
        assert all("norm" in name for name, one in theirs.items() if one != sums[name])
    core = core_of(parts)
    prepared = parts.weights.prepare(CheckpointKind.ZEROS)
    core.update(parts.weights.applied(prepared, core.info, version="zeros"), prepared.staged.apply)
    assert len(set(parts.weights.checksums().values())) < len(tensors) // 2
    assert not any(sums[name] == one for name, one in parts.weights.checksums().items())


def sha256(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.contiguous().view(torch.uint8).numpy().data).hexdigest()


def saved(folder: Path, tensors: Tensors) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(dict(tensors), folder / FILE)
    return folder


def with_config(folder: Path, model: Path, tensors: Tensors) -> Path:
    """Writes a complete model: the configuration of another model, and these weights."""
    saved(folder, tensors)
    (folder / "config.json").write_bytes((model / "config.json").read_bytes())
    return folder


def answer(core: EngineCore) -> dict[int, list[int]]:
    return run(core, [group("asked", PROMPT, n=2, seed=5)])["asked"].tokens


@pytest.mark.slow
@pytest.mark.parametrize(
    ("part", "numbers"),
    each_once(
        [
            "model.layers.1.self_attn.k_proj.weight",
            "model.layers.0.mlp.up_proj.weight",
            "model.layers.0.mlp.gate_proj.weight",
            "model.embed_tokens.weight",
            "lm_head.weight",
            "model.norm.weight",
        ],
        NUMBERS,
    ),
)
def test_some_tensors_alone_can_be_new(
    part: str, numbers: dict[str, Any], tiny: Callable[[str], Path], other: Callable[[str], Path], tmp_path: Path
) -> None:
    old, new = load_file(tiny("llama") / FILE), load_file(other("llama") / FILE)[part] * 1.5
    parts = built(tiny("llama"), numbers)
    core = core_of(parts)
    before = answer(core)
    renew(core, parts, saved(tmp_path / "part", {part: new}))
    fresh = built(with_config(tmp_path / "whole", tiny("llama"), {**old, part: new}), numbers)
    assert answer(core) == answer(core_of(fresh)) != before
    assert core.info.model_digest not in (parts.info.model_digest, fresh.info.model_digest)


@pytest.mark.slow
def test_a_part_can_be_added_without_the_earlier_parts_that_it_replaces(
    tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    norm, numbers = "model.norm.weight", {"dtype": "float32", "kernels": "torch"}
    old = load_file(tiny("llama") / FILE)[norm]
    folders = [saved(tmp_path / str(factor), {norm: old * factor}) for factor in (2, 3)]
    parts, restarted = (built(tiny("llama"), numbers) for _ in range(2))
    base = parts.weights.prepare(CheckpointKind.FILES, folders[:1]).prepared
    core = core_of(parts)
    for folder in folders:
        renew(core, parts, folder)
    added = restarted.weights.prepare(CheckpointKind.FILES, folders[1:], base=base.digest)
    assert base.names == added.prepared.names == (norm,)
    assert restarted.weights.applied(added, restarted.info, version=VERSION).model_digest == core.info.model_digest


def bad_tensors(old: Tensors) -> dict[str, tuple[Tensors, str]]:
    norm = "model.norm.weight"
    return {
        "unknown": (
            {**old, "model.layers.9.x": old[norm].clone()},
            "tensor model.layers.9.x: the model has no such tensor",
        ),
        "shape": ({**old, norm: old[norm][:8].clone()}, f"tensor {norm}: its shape is [8], and the model's is [64]"),
        "dtype": ({**old, norm: old[norm].long()}, f"tensor {norm}: its dtype is I64; BF16, F16, F32 can be used"),
        "none": ({}, "the checkpoint has no tensors"),
    }


@pytest.mark.slow
@pytest.mark.kernels
@pytest.mark.parametrize("fault", ["unknown", "shape", "dtype", "none", "truncated", "missing shard", "no folder"])
def test_unusable_weights_are_refused_by_name_and_the_old_ones_still_serve(
    fault: str, tiny: Callable[[str], Path], tmp_path: Path
) -> None:
    old = load_file(tiny("llama") / FILE)
    parts = built(tiny("llama"), {"dtype": "bfloat16"})
    core = core_of(parts)
    before = answer(core)
    tensors, words = bad_tensors(old).get(fault, (old, ""))
    folder = saved(tmp_path / "bad", tensors)
    if fault == "truncated":
        (folder / FILE).write_bytes((folder / FILE).read_bytes()[:-100])
        words = "bytes, but its header states"
    elif fault == "missing shard":
        (folder / FILE).unlink()
        (folder / "model.safetensors.index.json").write_text(
            '{"weight_map": {"lm_head.weight": "shard-2.safetensors"}}'
        )
        words = "shard-2.safetensors is missing"
    elif fault == "no folder":
        folder, words = tmp_path / "nowhere", "nowhere has no weights"
    with pytest.raises(RequestError) as refused:
        parts.weights.prepare(CheckpointKind.FILES, [folder])
    assert words in refused.value.message and refused.value.code == "invalid_weights"
    assert answer(core) == before


@pytest.mark.parametrize(
    ("dtype", "number", "why"),
    [
        (torch.bfloat16, float("nan"), "it has numbers that are NaN or infinite"),
        (torch.bfloat16, float("inf"), "it has numbers that are NaN or infinite"),
        (torch.float32, -float("inf"), "it has numbers that are NaN or infinite"),
        (torch.float16, 1e6, "it has numbers that are too large for float16"),
    ],
)
def test_numbers_that_are_not_finite_are_refused_by_name(
    dtype: torch.dtype, number: float, why: str, tmp_path: Path
) -> None:
    """The bug: the update was accepted, and then every request failed."""
    live = TensorWeights.of(torch.nn.Linear(40, 30, dtype=dtype))
    start = StartWeights(tmp_path, "digest of the start", load=lambda: torch.nn.Linear(40, 30))
    loader = WeightLoader(live, start, name_of=str, cache=tmp_path, published=PublishedForm())
    sums, good = loader.checksums(), {"weight": torch.randn(30, 40), "bias": torch.zeros(30)}
    assert loader.prepare(CheckpointKind.FILES, [saved(tmp_path / "good", good)]).prepared.complete
    bad = good["weight"].clone()
    bad[29, 39] = number
    with pytest.raises(RequestError) as refused:
        loader.prepare(CheckpointKind.FILES, [saved(tmp_path / "bad", {**good, "weight": bad})])
    assert (refused.value.message, refused.value.code) == (f"tensor weight: {why}", "invalid_weights")
    assert loader.checksums() == sums


def test_a_model_with_numbers_that_are_not_finite_is_not_started(tiny: Callable[[str], Path], tmp_path: Path) -> None:
    tensors = load_file(tiny("llama") / FILE)
    tensors["model.norm.weight"][63] = float("nan")
    folder = with_config(tmp_path / "bad", tiny("llama"), tensors)
    with pytest.raises(ModelLoadError) as refused:
        built(folder, {"dtype": "float32"})
    assert (
        refused.value.message == f"tensor model.norm.weight in {folder / FILE}: it has numbers that are NaN or infinite"
    )


@pytest.mark.slow
@pytest.mark.parametrize("fault", ["fifo", "hanging mount"])
def test_a_file_that_never_answers_ends_an_update_and_not_the_engine(
    fault: str, tiny: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The bug: the update waited for ever, with the lock that pauses needed."""
    parts = built(tiny("llama"), {"dtype": "float32", "kernels": "torch"})
    folder, answers = saved(tmp_path / "bad", load_file(tiny("llama") / FILE)), threading.Event()
    if fault == "fifo":
        (folder / FILE).unlink()
        os.mkfifo(folder / FILE)
        why = f"{folder / FILE} cannot be read: it is not a regular file"
    else:
        why = f"{folder / FILE} cannot be read: nothing has arrived for 0.1 s, as from a network mount that hangs"
        monkeypatch.setattr(file_reading, "STALL_S", 0.1)
        monkeypatch.setattr(FileReading, "_fill", lambda *_, file: answers.wait(PATIENCE_S))
    preparing = in_daemon_thread(lambda: parts.weights.prepare(CheckpointKind.FILES, [folder]), name="update")
    with pytest.raises(RequestError) as refused:
        preparing.result(PATIENCE_S)
    assert (refused.value.message, refused.value.code) == (why, "invalid_weights")
    answers.set()
    monkeypatch.undo()
    assert parts.weights.prepare(CheckpointKind.FILES, [tiny("llama")]).prepared.complete


@pytest.mark.slow
@pytest.mark.kernels
def test_tied_weights_have_one_content_under_both_names(tmp_path: Path) -> None:
    config = LlamaConfig(**{**config_of("llama").to_dict(), "tie_word_embeddings": True})
    folder = save_model_of(config, tmp_path / "tied")
    parts = built(folder, {"dtype": "bfloat16"})
    core, old = core_of(parts), load_file(folder / FILE)
    first, second = "model.embed_tokens.weight", "lm_head.weight"
    assert parts.weights.prepare(
        CheckpointKind.FILES, [saved(tmp_path / "both", {**old, second: old[first].clone()})]
    ).prepared.complete
    with pytest.raises(RequestError, match=f"tensor {second}: it is tied to {first}, and has other numbers"):
        parts.weights.prepare(CheckpointKind.FILES, [saved(tmp_path / "differ", {**old, second: old[first] + 1})])
    before = answer(core)
    renew(core, parts, saved(tmp_path / "second", {second: old[first] * 2}))
    undivided = with_config(tmp_path / "whole", folder, {**old, first: old[first] * 2})
    assert answer(core) == answer(core_of(built(undivided, {"dtype": "bfloat16"}))) != before


@pytest.mark.slow
def test_tickets_for_kv_of_other_weights_are_not_used_and_their_leases_end(
    tiny: Callable[[str], Path], other: Callable[[str], Path]
) -> None:
    """First the prefill core has new weights and the decode core has not, then both have: the ticket is older."""
    pair = CorePair(tiny("llama"))
    groups = [group(f"{number}", prompt_of(50, number), n=2, seed=number) for number in range(4)]
    pair.hand_over(groups[0])
    pair.finish()
    older = pair.prefill(groups[1])
    renew(pair.p, pair.parts["P"], other("llama"))
    pair.hand_over(groups[2])
    pair.finish()
    pair.check_same(groups[0], groups[2])
    assert pair.d.counters.transfer_failures == {FailureKind.WEIGHTS: 1}
    renew(pair.d, pair.parts["D"], other("llama"))
    pair.submit(with_ticket(groups[1], older))
    pair.finish()
    assert pair.d.counters.transfer_failures == {FailureKind.WEIGHTS: 2}
    pair.hand_over(groups[3])
    pair.finish()
    assert pair.d.counters.transfers == 2
    expected = alone(other("llama"), groups[1], groups[3])
    assert tokens(pair.outcomes, ["1", "3"]) == expected
    pair.settle_p()
    assert pair.p.stats().blocks_used == pair.d.stats().blocks_used == 0
