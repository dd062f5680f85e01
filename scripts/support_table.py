"""Write docs/support.md: which causal-LM families of transformers support stages, packing, sampling and training.

Every family is built tiny from its default config, on the CPU, and probed with the checks that a run performs on the
user's own config. Nothing is downloaded.

    python scripts/support_table.py [--families llama,qwen3] [--output docs/support.md]
    python scripts/support_table.py --training        # renew that column only, which takes most of the time
    python scripts/support_table.py --render          # write the page anew from its own table, without measuring
    python scripts/support_table.py --output NEW --compare docs/support.md   # what differs, without training
"""

from __future__ import annotations

import argparse
import copy
import re
import signal
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
import transformers
from support_training import FLOAT32, TrainingError, check_training
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedModel

from automodel_cli.config.errors import ConfigError
from automodel_cli.models.hub import multimodal_backbone
from automodel_cli.models.packing_support import probe_packing
from automodel_cli.pipelining.cut.model_structure import NotMeasuredError, SplitError
from automodel_cli.pipelining.cut.split_check import probe
from automodel_cli.rollout.engines.decoding_check import check_decoding

SECONDS_PER_FAMILY = 60
SECONDS_PER_TRAINING = 240  # of two processes that share the machine with others
# Default configs of the library leave open what every published config of the family says.
USUAL = {
    "head_dim": 64,
    "num_key_value_heads": 4,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "num_experts_per_tok": 6,
    "n_group": 1,
    "topk_group": 1,
    "layer_types": ["conv", "conv", "full_attention", "conv"] * 8,
    "default_language": "en_XX",
    "indexer_n_heads": 8,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 128,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
}
# Families that people fine-tune now come first in the table; the rest follows by name.
FIRST = (
    "qwen3_5", "qwen3_5_moe", "qwen3", "qwen3_moe", "qwen3_next", "gemma3", "gemma4", "llama", "llama4", "gpt_oss",
    "deepseek_v3", "deepseek_v32", "deepseek_v4", "glm4_moe", "glm_moe_dsa", "kimi_linear", "minimax_m2", "mistral",
    "ministral3", "mixtral", "phi3", "granite", "granitemoehybrid", "nemotron_h", "lfm2", "lfm2_moe", "lfm3",
    "falcon_h1", "jamba", "bamba", "olmo3", "olmo_hybrid", "smollm3", "qwen2", "gemma2", "cohere2", "mamba2", "zamba2",
)  # fmt: skip


CAPABILITIES = ("split", "packing", "sampling", "training")


@dataclass(frozen=True)
class Row:
    """One family: `yes`, `no` or `unknown` for each capability, with the reason where it is not yes."""

    family: str
    model_class: str
    split: str
    packing: str
    sampling: str
    training: str
    notes: tuple[str, ...]


def families() -> Iterator[tuple[str, PretrainedConfig, type[PreTrainedModel]]]:
    """(model_type, default config, causal-LM class) of every decoder family that the library registers; of a composite,
    those of its language model."""
    for name in sorted(CONFIG_MAPPING):
        config_class = CONFIG_MAPPING[name]
        if config_class not in MODEL_FOR_CAUSAL_LM_MAPPING:
            continue
        try:
            config = multimodal_backbone.text_config(config_class())
        except Exception:
            continue  # a composite that cannot exist without its parts
        if config.is_encoder_decoder or type(config) not in MODEL_FOR_CAUSAL_LM_MAPPING:
            continue
        found: Any = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        model_class = found[0] if isinstance(found, tuple) else found
        config.is_decoder = True  # bert and its kin are causal only when told so
        yield name, config, model_class


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    def stop(signum: int, frame: object) -> None:
        raise TimeoutError(f"took more than {seconds} CPU seconds")

    signal.signal(signal.SIGPROF, stop)
    signal.setitimer(
        signal.ITIMER_PROF, seconds
    )  # of this process's CPU time: other work on the machine does not count
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


def measure(check: Callable[[], object], seconds: int = SECONDS_PER_FAMILY) -> tuple[str, str]:
    """(verdict, reason)."""
    try:
        with time_limit(seconds):
            check()
    except NotMeasuredError as error:
        return "unknown", error.reason
    except SplitError as error:
        return "no", error.reason
    except TrainingError as error:
        return "no", str(error)
    except ConfigError as error:
        with_fix = f"{error.message} (works with: {error.fix})" if error.fix else error.message
        return "unknown" if error.code == "not_measured" else "no", with_fix
    except Exception as error:
        return "unknown", f"{type(error).__name__}: {error}"
    return "yes", ""


def with_usual_fields(config: PretrainedConfig) -> PretrainedConfig:
    """A copy with the fields of `USUAL` filled where the family has them and its default is None."""
    full = copy.deepcopy(config)
    text = full.get_text_config()
    fields = text.to_dict()
    for name, value in USUAL.items():
        if name in fields and fields[name] is None:
            setattr(text, name, value)
    if fields.get("rope_parameters") == {} and fields.get("layer_types"):
        text.rope_parameters = {kind: {"rope_type": "default", "rope_theta": 1e4} for kind in fields["layer_types"]}
    for value in vars(text).values():  # DBRX reads a field of its part that the part's class does not declare
        if isinstance(value, PretrainedConfig) and value.base_config_key == "attn_config":
            value.rope_theta, value.clip_qkv = 5e5, 8.0
    return full


def row_of(name: str, config: PretrainedConfig, model_class: type[PreTrainedModel], known: Row | None = None) -> Row:
    """Every capability of a family; with a `known` row only `training`, and the rest as it says."""
    return with_training(known or measured(name, config, model_class), config)


def measured(name: str, config: PretrainedConfig, model_class: type[PreTrainedModel]) -> Row:
    """Every capability of a family but `training`."""

    def split_of(config: PretrainedConfig) -> tuple[str, str]:
        text = config.get_text_config()
        own: Any = model_class.config_class
        config = text if isinstance(text, own) else config  # as the library's Auto class does it
        return measure(lambda: probe(model_class, copy.deepcopy(config)))

    split, split_reason = split_of(config)
    if split == "unknown":
        config = with_usual_fields(config)
        split, split_reason = split_of(config)
    packing, packing_reason = measure(lambda: probe_packing(copy.deepcopy(config)))
    sampling, sampling_reason = measure(lambda: check_decoding(copy.deepcopy(config)))
    reasons = (("split", split_reason), ("packing", packing_reason), ("sampling", sampling_reason))
    notes = [f"{what}: {short(reason)}" for what, reason in reasons if reason]
    return Row(name, model_class.__name__, split, packing, sampling, "unknown", tuple(notes))


def with_training(row: Row, config: PretrainedConfig) -> Row:
    verdict, reason = measure(lambda: check_training(copy.deepcopy(config), SECONDS_PER_TRAINING))
    usual = with_usual_fields(config)
    if verdict != "yes" and usual.to_dict() != config.to_dict():
        verdict, reason = measure(lambda: check_training(usual, SECONDS_PER_TRAINING))
    notes = [note for note in row.notes if not note.startswith("training: ")]
    notes += [f"training: {short(reason)}"] if reason else []
    return replace(row, training=verdict, notes=tuple(notes))


def short(reason: str, limit: int = 260) -> str:
    """Return a reason on one line, without the stack that a library's message may quote."""
    reason = re.sub(r"\W*Traceback \(most recent call last\).*", "", reason, flags=re.S)
    text = " ".join(reason.split()).replace("|", "\\|")
    return text if len(text) <= limit else text[: limit - 3] + "..."


INTRO = """# Supported models

Every causal-LM family of transformers is tested. A run also tests your own config before training and rejects what does
not work, so this page is information and not a restriction.

| column | yes means |
|---|---|
| split | three uneven pipeline stages give the log-probs and gradients of the whole model |
| packing | packed documents give the results of separate documents, in training mode |
| sampling | the built-in sampler (`rollout=sampler`) generates tokens with the log-probs \
of the whole sequence; otherwise use `rollout=hf`, vLLM or SGLang |
| training | two ranks with FSDP2 and bfloat16 compute load a checkpoint, train one step and \
export it; transformers in float32 gives the export the log-probs of the trained model, up to bfloat16 rounding |

## Popular models

"""

NOTES = """
## How families are handled

- **Recurrent layers** (gated delta nets, Mamba, short convolutions, linear attention) are detected by a probe. They run
  per document through the family's own module.
- **Attention that packing cannot compute** (sparse attention with an indexer, compressed attention, biases by position,
  dropout, custom attention classes) also runs per document. Context parallelism is not available for it.
- **Multimodal checkpoints.** Only the language model is built. The export is the whole repository with the trained text
  weights.
- **Other tensors** of a checkpoint, such as layers for multi-token prediction, are copied to the export. `model.mtp`
  trains these layers.

## Attention that is dense

Packed attention stores no scores of tokens x tokens, except in the following cases. A warning gives the memory per
layer in MiB.

| device | dense attention |
|---|---|
| CPU | soft caps (gemma2, vaultgemma), because FlexAttention has no backward there; documents are still isolated |
| CUDA | float64; soft caps, float32, and head widths above 256 or not a multiple of 8 \
only if FlexAttention is unavailable or fails its check |
| other devices | always |

FlexAttention supports recomputation, tensor, context (gathered or ring) and pipeline parallelism.
`model.attention_kernel=dense` and `model.attn_implementation=eager` select dense attention without a warning.

## All families
"""

POPULAR = {
    "qwen3_5": "Qwen3.5",
    "qwen3_5_moe": "Qwen3.5 MoE",
    "qwen3": "Qwen3",
    "qwen3_moe": "Qwen3 MoE (30B-A3B, 235B-A22B)",
    "qwen3_next": "Qwen3-Next",
    "qwen2": "Qwen2.5",
    "gemma3": "Gemma 3",
    "gemma4": "Gemma 4",
    "llama": "Llama 2 to 3.3, SmolLM2",
    "llama4": "Llama 4",
    "gpt_oss": "gpt-oss",
    "deepseek_v3": "DeepSeek-V3 and R1, Moonlight, Kimi K2",
    "deepseek_v32": "DeepSeek-V3.2",
    "glm4_moe": "GLM-4.5, GLM-4.6",
    "glm_moe_dsa": "GLM-5",
    "kimi_linear": "Kimi-Linear",
    "minimax_m2": "MiniMax-M2",
    "mistral": "Mistral 7B",
    "ministral3": "Ministral 3",
    "mixtral": "Mixtral",
    "phi3": "Phi-3, Phi-4",
    "granitemoehybrid": "Granite 4",
    "nemotron_h": "Nemotron-H, Nemotron 3",
    "lfm2": "LFM2",
    "olmo3": "OLMo 3",
    "smollm3": "SmolLM3",
}
"""Families of the first table, and the models that readers know them by."""


def _popular(row: Row) -> str:
    verdicts = " | ".join(getattr(row, what) for what in CAPABILITIES)
    return f"| {POPULAR[row.family]} | `{row.family}` | {verdicts} |"


def render(rows: list[Row]) -> str:
    """Return the page: a table of popular models, notes, the full table, and the reasons of failures."""
    totals = {what: Counter(getattr(row, what) for row in rows) for what in CAPABILITIES}
    library, torch_version = transformers.__version__, torch.__version__.split("+")[0]
    order = {name: index for index, name in enumerate(FIRST)}
    rows = sorted(rows, key=lambda r: (order.get(r.family, len(order)), r.family))
    known = {row.family: row for row in rows}
    lines = [
        INTRO.rstrip("\n"),
        "",
        "| model | family | split | packing | sampling | training |",
        "|---|---|---|---|---|---|",
        *(_popular(known[family]) for family in POPULAR if family in known),
        "",
        *(
            f"- {POPULAR[family]}: {'; '.join(map(_in_words, known[family].notes))}."
            for family in POPULAR
            if family in known and known[family].notes
        ),
        NOTES,
        f"Measured with transformers {library} and torch {torch_version} by `scripts/support_table.py` on tiny copies",
        "of the default configs. *Unknown*: the copy cannot be built or run. If a family needs another attention or",
        "other rows for packing, the reason names it.",
        "",
        "| number of families | yes | no | unknown |",
        "|---|--:|--:|--:|",
        *(f"| {what} | {c['yes']} | {c['no']} | {c['unknown']} |" for what, c in totals.items()),
        "",
        "| family | class | split | packing | sampling | training |",
        "|---|---|---|---|---|---|",
        *(f"| {r.family} | {r.model_class} | {r.split} | {r.packing} | {r.sampling} | {r.training} |" for r in rows),
        "",
        "## Reasons",
        "",
        *(f"- {r.family}: {'; '.join(map(_in_words, r.notes))}." for r in rows if r.notes),
        "",
        "<details><summary>Errors in full</summary>",
        "",
        *(f"- {r.family}: {'; '.join(r.notes)}" for r in rows if r.notes),
        "",
        "</details>",
    ]
    return "\n".join(lines) + "\n"


# Part of a reason, and the words for a reader. The first match counts.
IN_WORDS = (
    (
        f"works with: {FLOAT32}",
        f"transformers' own model cannot compute in bfloat16 under FSDP2; `{FLOAT32}` trains it",
    ),
    ("is a GradientCheckpointingLayer", "transformers marks none of its modules as a layer, which FSDP2 needs here"),
    ("the library's own model fails alike", "transformers' own model fails under FSDP2 too"),
    ("it is a drafter", "it is a draft model for another model"),
    ("it is a draft model", "it is a draft model for another model"),
    (
        "runs one document at a time, without cache slots",
        "its attention runs per document, without a KV cache; use `rollout=hf`",
    ),
    ("document by document on full rows", "its attention runs document by document"),
    ("not once each and in order", "some of its layers are skipped on text"),
    (
        "does not support a KV cache",
        "its layers also attend over earlier layers, which packed attention does not support",
    ),
    ("expected one module list", "its decoder is not one list of layers"),
    ("differs between its stages", "its layers read embeddings, keys or weights of an earlier stage"),
    ("its stages", "its layers exchange more than hidden states"),
    ("[rows, tokens, ...]", "its layers return several hidden states"),
    ("attention_dropout=", "its attention has dropout, and it counts positions from its padding id"),
    ("has no dropout", "its attention has dropout, and it counts positions from its padding id"),
    (
        "does not give packed documents",
        "its attention cannot be restricted to documents",
    ),
    ("mixes packed documents", "its attention cannot be restricted to documents"),
    ("token by token", "incremental decoding gives other log-probs than the whole text"),
    ("a small copy fails", "it cannot be decoded through the caches of the sampler"),
    ("could not convert", "transformers cannot convert its checkpoint tensor by tensor, which sharded loading needs"),
    ("no small copy", "not measured: no small copy of it can be built"),
    ("a small copy of the model does not run", "not measured: a small copy of it does not run"),
    ("cannot be measured", "not measured: a small copy of it does not run"),
)


def _in_words(note: str) -> str:
    what, _, reason = note.partition(": ")
    return f"{what}: {next((words for part, words in IN_WORDS if part in reason), reason)}"


def _full_table(page: str) -> str:
    """Return the page from the table of all families on."""
    return page[page.index("| family | class |") :]


def rows_of(table: str) -> dict[str, Row]:
    """Of a rendered table, with what was raised; a column that it has not is unknown."""
    table = _full_table(table)
    header = table.splitlines()[0]
    columns = header.strip("| ").split(" | ")[2:]
    start = re.compile("; (?=(?:" + "|".join(CAPABILITIES) + "): )")
    raised = table.partition("<summary>Errors in full</summary>")[2]
    notes = dict(line[2:].split(": ", 1) for line in raised.splitlines() if line.startswith("- "))
    rows = {}
    for line in table.splitlines():
        cells = line.strip("| ").split(" | ")
        if line.startswith("| ") and len(cells) == 2 + len(columns) and cells[0] != "family":
            found = dict.fromkeys(CAPABILITIES, "unknown") | dict(zip(columns, cells[2:], strict=True))
            rows[cells[0]] = Row(
                cells[0],
                cells[1],
                **found,
                notes=tuple(start.split(notes.get(cells[0], "")) if cells[0] in notes else ()),
            )
    return rows


def changes(old: dict[str, Row], new: dict[str, Row]) -> list[str]:
    """What differs between two tables, without the column training, one line a family."""
    lines = [f"{name}: not there" for name in old if name not in new]
    lines += [f"{name}: new: {_verdicts(new[name])}" for name in new if name not in old]
    for name in old:
        if name in new and (before := _verdicts(old[name])) != (now := _verdicts(new[name])):
            lines.append(f"{name}: {before} -> {now}")
    return lines


def _verdicts(row: Row) -> str:
    return ", ".join(f"{what} {getattr(row, what)}" for what in CAPABILITIES if what != "training")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", help="comma-separated model types (default: all)")
    parser.add_argument("--output", type=Path, default=Path("docs/support.md"))
    parser.add_argument("--compare", type=Path, help="print what differs from this table; do not measure training")
    parser.add_argument("--training", action="store_true", help="measure that column only; the rest is as in --output")
    parser.add_argument("--render", action="store_true", help="write --output anew from its own table; measure nothing")
    options = parser.parse_args()
    if options.render:
        known = rows_of(options.output.read_text(encoding="utf-8"))
        options.output.write_text(render(list(known.values())), encoding="utf-8")
        return
    wanted = options.families.split(",") if options.families else None
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    rows = rows_of(options.output.read_text(encoding="utf-8")) if options.training else {}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    for name, config, model_class in families():
        if wanted is None or name in wanted:
            measure_row = measured if options.compare else partial(row_of, known=rows.get(name))
            row = rows[name] = measure_row(name, config, model_class)
            verdicts = " ".join(f"{what} {getattr(row, what):8s}" for what in CAPABILITIES)
            print(f"{name:28s} {verdicts} {'; '.join(row.notes)[:150]}", flush=True)
            options.output.write_text(render(list(rows.values())), encoding="utf-8")  # what is known so far
    if options.compare:
        before = rows_of(options.compare.read_text(encoding="utf-8"))
        was = {name: row for name, row in before.items() if wanted is None or name in wanted}
        print("\n".join(["== differences", *changes(was, rows)]))


if __name__ == "__main__":
    main()
