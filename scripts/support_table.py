"""Write docs/support.md: which causal-LM families of the installed transformers can be cut, packed and sampled.

Every family is built tiny from its default config, on the CPU, and probed with the checks that a run performs on the
user's own config. Nothing here is a list of names, and nothing is downloaded.

    python scripts/support_table.py [--families llama,qwen3] [--output docs/support.md]
    python scripts/support_table.py --training        # renew that column only, which takes most of the time
    python scripts/support_table.py --against 5.17.0    # in an environment of its own: what differs from --output
"""

from __future__ import annotations

import argparse
import copy
import re
import signal
import subprocess
import sysconfig
import tempfile
import venv
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
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
from automodel_cli.rollout.engines.policy_engine import check_decoding

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
        if config.is_encoder_decoder:
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


def measure(check: Callable[[], object]) -> tuple[str, str]:
    """(verdict, reason)."""
    try:
        with time_limit(SECONDS_PER_FAMILY):
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
    if known is not None:
        return with_training(known, config)

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
    notes = [f"{what}: {_short(reason)}" for what, reason in reasons if reason]
    found = Row(name, model_class.__name__, split, packing, sampling, "unknown", tuple(notes))
    return with_training(found, config)


def with_training(row: Row, config: PretrainedConfig) -> Row:
    verdict, reason = measure(lambda: check_training(copy.deepcopy(config), SECONDS_PER_TRAINING))
    usual = with_usual_fields(config)
    if verdict != "yes" and usual.to_dict() != config.to_dict():
        verdict, reason = measure(lambda: check_training(usual, SECONDS_PER_TRAINING))
    notes = [note for note in row.notes if not note.startswith("training: ")]
    notes += [f"training: {_short(reason)}"] if reason else []
    return replace(row, training=verdict, notes=tuple(notes))


def _short(reason: str, limit: int = 260) -> str:
    text = " ".join(reason.split()).replace("|", "\\|")
    return text if len(text) <= limit else text[: limit - 3] + "..."


DENSE = """## Attention that is dense

Packed attention keeps no scores of tokens x tokens, except in these cases, each with a warning that says how many MiB
a layer keeps for its backward:

- On a CPU, soft caps (gemma2, vaultgemma): torch's kernel for it has none, and FlexAttention has no backward there.
  Documents are computed apart all the same.
- On CUDA, soft caps, float32 and heads wider than 256 or of no multiple of 8 only where FlexAttention cannot run:
  triton is missing, or its kernel fails or differs from the definition. float64 always.
- On other devices everything.

FlexAttention works under recomputation, tensor, context (gathered or in a ring) and pipeline parallelism alike.
`model.attention_kernel=dense` and `model.attn_implementation=eager` ask for dense attention, without a warning.

## Families
"""


def render(rows: list[Row]) -> str:
    totals = {what: Counter(getattr(row, what) for row in rows) for what in CAPABILITIES}
    library, torch_version = transformers.__version__, torch.__version__.split("+")[0]
    intro = f"""# Which model families work

Measured with transformers {library} and torch {torch_version} by `scripts/support_table.py`: every family is built tiny
from its default config. *Split*: three uneven pipeline stages give the log-probs and gradients of the whole model.
*Packing*: packed documents give what separate ones give, in a part that is built and run as in training; where the
family's default configuration needs another attention or other rows, the note says which. *Sampling*: what
`rollout=sampler` draws token by token has the log-probs that the whole sequence has; the library's own generation
(`rollout=hf`) is there for the others. *Training*: on two ranks in the default precision (float32 parameters, FSDP2
with bfloat16 compute) a checkpoint is loaded, trained one step and exported. The library's own model in float32 gives
the export the log-probs of the trained model, up to the rounding of bfloat16. A run probes the user's own config in the
same way and refuses what differs, so this table is information, not a gate. *Unknown*: the tiny copy could not be built
or run, so nothing was measured.

Layers that carry a state from token to token (gated delta nets, Mamba, short convolutions, linear attention) are found
by measurement and run document by document through the family's own module; so is all attention of families that
packed attention cannot compute (sparse attention with an indexer, compressed attention, biases by position, dropout,
attention of a class's own), which cannot share rows between ranks. Of a multimodal repository the language model is
built alone; the export is the whole repository with other text weights. What else a checkpoint holds and the
model does not build (layers for multi-token prediction, say) is carried to the export; `model.mtp` trains these.
"""
    order = {name: index for index, name in enumerate(FIRST)}
    rows = sorted(rows, key=lambda r: (order.get(r.family, len(order)), r.family))
    lines = [
        intro,
        DENSE,
        "| | yes | no | unknown |",
        "|---|--:|--:|--:|",
        *(f"| {what} | {c['yes']} | {c['no']} | {c['unknown']} |" for what, c in totals.items()),
        "",
        f"Exact in all: {', '.join(r.family for r in rows if {getattr(r, what) for what in CAPABILITIES} == {'yes'})}.",
        "",
        "| family | class | split | packing | sampling | training |",
        "|---|---|---|---|---|---|",
        *(f"| {r.family} | {r.model_class} | {r.split} | {r.packing} | {r.sampling} | {r.training} |" for r in rows),
        "",
        "## Why not",
        "",
        *(f"- {r.family}: {'; '.join(map(_in_words, r.notes))}." for r in rows if r.notes),
        "",
        "<details><summary>What was raised</summary>",
        "",
        *(f"- {r.family}: {'; '.join(r.notes)}" for r in rows if r.notes),
        "",
        "</details>",
    ]
    return "\n".join(lines) + "\n"


# What a reason says (a part of it), for a reader. The first that fits.
IN_WORDS = (
    (
        f"works with: {FLOAT32}",
        f"the library's own model cannot compute in bfloat16 under FSDP2; `{FLOAT32}` trains it",
    ),
    ("is a GradientCheckpointingLayer", "the library marks none of its modules as a layer, which FSDP2 needs here"),
    ("the library's own model fails alike", "the library's own model fails alike under FSDP2"),
    ("it is a drafter", "it is a drafter for another model"),
    ("it is a draft model", "it is a draft model of another model"),
    (
        "run document by document, which has no slots",
        "attention that is run per document has no slots; rollout=hf samples",
    ),
    ("document by document on full rows", "its attention runs document by document"),
    ("not once each and in order", "some of its layers are skipped on text"),
    ("expected one module list", "its decoder is not one list of layers"),
    ("differs between its stages", "its layers read embeddings, keys or weights that an earlier stage has"),
    ("its stages", "its layers hand each other more than hidden states"),
    ("[rows, tokens, ...]", "its layers hand on several hidden states at once"),
    ("attention_dropout=", "its attention has dropout, and it counts positions after its padding id"),
    ("has no dropout", "its attention has dropout, and it counts positions after its padding id"),
    (
        "does not give packed documents",
        "its attention has a layout that cannot be cut into documents",
    ),
    ("mixes packed documents", "its attention has a layout that cannot be split into documents"),
    ("token by token", "token by token it gives other log-probs than the whole text"),
    ("a small copy of it fails", "it cannot be decoded through the caches of the sampler"),
    ("no small copy", "not measured: no small copy of it can be built"),
    ("a small copy of the model does not run", "not measured: a small copy of it does not run"),
    ("cannot be measured", "not measured: a small copy of it does not run"),
)


def _in_words(note: str) -> str:
    what, _, reason = note.partition(": ")
    return f"{what}: {next((words for part, words in IN_WORDS if part in reason), reason)}"


def rows_of(table: str) -> dict[str, Row]:
    """Of a rendered table, with what was raised; a column that it has not is unknown."""
    header = next(line for line in table.splitlines() if line.startswith("| family | class |"))
    columns = header.strip("| ").split(" | ")[2:]
    start = re.compile("; (?=(?:" + "|".join(CAPABILITIES) + "): )")
    raised = table.partition("<summary>What was raised</summary>")[2]
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


def verdicts(table: str) -> dict[str, tuple[str, ...]]:
    """Of a rendered table: family -> its verdict on each capability."""
    cells = [line.strip("| ").split(" | ") for line in table.splitlines() if line.startswith("| ")]
    rows = [row for row in cells if len(row) == 2 + len(CAPABILITIES) and row[0] != "family"]
    return {row[0]: tuple(row[2:]) for row in rows}


def changes(old: dict[str, tuple[str, ...]], new: dict[str, tuple[str, ...]]) -> list[str]:
    """What a reader of the table must know of another release, one line a family."""
    lines = [f"{name}: not there" for name in old if name not in new]
    lines += [f"{name}: new: {_said(new[name])}" for name in new if name not in old]
    for name in old:
        if name in new and old[name] != new[name]:
            lines.append(f"{name}: {_said(old[name])} -> {_said(new[name])}")
    return lines


def _said(found: tuple[str, ...]) -> str:
    return ", ".join(f"{what} {verdict}" for what, verdict in zip(CAPABILITIES, found, strict=True))


def against(release: str, table: Path, options: list[str]) -> None:
    """Build the table in an environment of its own that has this release of transformers (`latest`: the index's
    newest), and print how it differs from `table`. Everything else comes from this environment."""
    with tempfile.TemporaryDirectory() as folder:
        python = Path(folder, "bin", "python")
        venv.create(folder, with_pip=True)
        wanted = "transformers" if release == "latest" else f"transformers=={release}"
        subprocess.run([python, "-m", "pip", "install", "-q", "--disable-pip-version-check", wanted], check=True)
        there = subprocess.run(
            [python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"], check=True, capture_output=True
        )
        # after its own packages: this environment's torch, and this project
        paths = "\n".join([sysconfig.get_path("purelib"), str(Path(__file__).resolve().parents[1])])
        Path(there.stdout.decode().strip(), "zz_outer.pth").write_text(paths + "\n", encoding="utf-8")
        found = Path(folder, "support.md")
        subprocess.run([python, __file__, "--output", found, *options], check=True, stdout=subprocess.DEVNULL)
        new = found.read_text(encoding="utf-8")
    old = table.read_text(encoding="utf-8")
    for title, text in ((str(table), old), (release, new)):
        print(f"{title}: {' '.join(text.split('Measured with ')[1].split(' by ')[0].split())}")
        print("\n".join(line for line in text.splitlines() if line.startswith(tuple(f"| {w} |" for w in CAPABILITIES))))
    was, families_now = verdicts(old), verdicts(new)
    if "--families" in options:
        was = {name: found for name, found in was.items() if name in families_now}
    print("\n".join(changes(was, families_now)) or "no family differs")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", help="comma-separated model types (default: all)")
    parser.add_argument("--output", type=Path, default=Path("docs/support.md"))
    parser.add_argument("--against", metavar="VERSION", help="a release of transformers, or latest: print what differs")
    parser.add_argument("--training", action="store_true", help="measure that column only; the rest is as in --output")
    options = parser.parse_args()
    if options.against:
        chosen = ["--families", options.families] if options.families else []
        against(options.against, options.output, chosen)
        return
    wanted = options.families.split(",") if options.families else None
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    rows = rows_of(options.output.read_text(encoding="utf-8")) if options.training else {}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    for name, config, model_class in families():
        if wanted is None or name in wanted:
            row = rows[name] = row_of(name, config, model_class, rows.get(name))
            said = " ".join(f"{what} {getattr(row, what):8s}" for what in CAPABILITIES)
            print(f"{name:28s} {said} {'; '.join(row.notes)[:150]}", flush=True)
            options.output.write_text(render(list(rows.values())), encoding="utf-8")  # what is known so far


if __name__ == "__main__":
    main()
