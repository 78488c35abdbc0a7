"""Generates the table of families in docs/models.md, from `tests.tiny_models`, `tests.tiny_architectures` and the
ratios that `bench.kernels.families --save` stored, and the list of what the tests check for each of these models.

Run: python -m tools.models_page          writes both
     python -m tools.models_page --check  fails if one is out of date
"""

import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from bench.kernels.families import LONG, PROMPT, SHORT, SavedRatios, decode_case
from tests.tiny_architectures import ARCHITECTURES, MODELS, WITHOUT_KERNELS
from tests.tiny_models import FAMILIES

PAGE = Path(__file__).resolve().parent.parent / "docs" / "models.md"
BEGIN, END = "<!-- table of families: python -m tools.models_page -->\n", "<!-- end of the table -->\n"
HEAD = """\
| family | architecture | backend on a CPU | dtypes | int8 weights | LoRA adapters | speed against torch |
|---|---|---|---|---|---|---|
"""
CASES = decode_case(1), decode_case(8), PROMPT
"""Cases of the last column, in the order of its figures."""
SPEEDS = """
The last column is the ratio of tokens/s, compiled kernels / torch's operators: for one choice and for eight choices,
both after a prompt of {short:,} tokens, and for a prompt of {long:,} tokens. The models have random weights, four
layers and the default model's sizes. Some mixtures have experts of width 32, for which the ratios are higher.
`python -m bench.kernels.families --save` measured them on {date}, in CPU time, in {dtype}, with one thread of a machine
with {cores} cores ({cpu}).
"""
TESTED = """
The tests check each row of the table with a small model with random weights, on the backend of the row:

- In float32, greedy tokens equal the output of `transformers.generate`.
- In float32 and bfloat16, a choice is the same bit for bit alone, in a group, and when its prompt is computed in
  chunks.
- In float32 and bfloat16, a group has the same tokens when one engine computes its prompt and another one decodes it
  after one transfer, and when another engine continues its choices after some output tokens, as after a worker is
  killed.

This command runs all cases:

<!-- not run: make test-long runs these tests -->
```sh
.venv/bin/pytest --hypothesis-profile=long tests/engines/native/{test_families,test_sameness,test_architectures}.py
```
"""
ADAPTERS = "yes"
"""The cell in the column of adapters. The test of the architectures checks it for each of them."""


def rows(ratios: Mapping[str, Mapping[str, float]]) -> Iterator[str]:
    """Yields the rows of the table: architectures with compiled kernels first, each group in alphabetical order."""
    known = {name.lower(): name for name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()}
    names = {*(family.title() for family in FAMILIES), *ARCHITECTURES}
    for name in sorted(names, key=lambda name: (name in WITHOUT_KERNELS, name.lower())):
        architecture = known.get(f"{name}ForCausalLM".lower()) or known[f"{name}LMHeadModel".lower()]
        reason = WITHOUT_KERNELS.get(name)
        backend = "compiled kernels" if reason is None else f"torch's operators: {reason}"
        dtypes = "bfloat16, float32" if reason is None else "bfloat16, float16, float32"
        int8 = "no" if reason else "yes"
        cells = MODELS.get(name, name), f"`{architecture}`", backend, dtypes, int8, ADAPTERS, speed(ratios.get(name))
        yield f"| {' | '.join(cells)} |\n"


def speed(ratios: Mapping[str, float] | None) -> str:
    """Returns the cell of the last column. A dash stands for a family that was not measured."""
    return "-" if ratios is None else " / ".join(f"{ratios[case]:.1f}" for case in CASES)


def page() -> str:
    """Returns the text of the page with the table as it should be."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    saved = SavedRatios.read()
    measured = SPEEDS.format(short=SHORT, long=LONG, **saved.conditions)
    return f"{before}{BEGIN}{HEAD}{''.join(rows(saved.ratios))}{measured}{TESTED}{END}{rest.partition(END)[2]}"


if __name__ == "__main__":
    if "--check" not in sys.argv:
        PAGE.write_text(page())
    elif PAGE.read_text() != page():
        sys.exit("docs/models.md is out of date; run python -m tools.models_page")
