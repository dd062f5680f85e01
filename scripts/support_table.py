"""Write docs/support.md: which causal-LM families of the installed transformers can be cut, packed and sampled.

Every family is built tiny from its default config, on the CPU, and probed with the checks that a run performs on the
user's own config. Nothing here is a list of names, and nothing is downloaded.

    python scripts/support_table.py [--families llama,qwen3] [--output docs/support.md]
"""

from __future__ import annotations

import argparse
import copy
import signal
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
import transformers
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, PretrainedConfig, PreTrainedModel

from automodel_cli.config.errors import ConfigError
from automodel_cli.models import composite
from automodel_cli.models.support import probe_packing
from automodel_cli.pipelining.cut.anatomy import NotMeasuredError, SplitError
from automodel_cli.pipelining.cut.probe import probe
from automodel_cli.rollout.model_engines import check_decoding

SECONDS_PER_FAMILY = 60
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


CAPABILITIES = ("split", "packing", "sampling")


@dataclass(frozen=True)
class Row:
    """One family: `yes`, `no` or `unknown` for each capability, with the reason where it is not yes."""

    family: str
    model_class: str
    split: str
    packing: str
    sampling: str
    notes: tuple[str, ...]


def families() -> Iterator[tuple[str, PretrainedConfig, type[PreTrainedModel]]]:
    """(model_type, default config, causal-LM class) of every decoder family that the library registers; of a composite,
    those of its language model."""
    for name in sorted(CONFIG_MAPPING):
        config_class = CONFIG_MAPPING[name]
        if config_class not in MODEL_FOR_CAUSAL_LM_MAPPING:
            continue
        try:
            config = composite.text_config(config_class())
        except Exception:
            continue  # a composite that cannot exist without its parts
        if config.is_encoder_decoder:
            continue
        found = MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]
        model_class = found[0] if isinstance(found, tuple) else found
        config.is_decoder = True  # bert and its kin are causal only when told so
        yield name, config, model_class


@contextmanager
def time_limit(seconds: int) -> Iterator[None]:
    def stop(signum: int, frame: object) -> None:
        raise TimeoutError(f"took more than {seconds} s")

    signal.signal(signal.SIGALRM, stop)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)


def measure(check: Callable[[], object]) -> tuple[str, str]:
    """(verdict, reason)."""
    try:
        with time_limit(SECONDS_PER_FAMILY):
            check()
    except NotMeasuredError as error:
        return "unknown", error.reason
    except SplitError as error:
        return "no", error.reason
    except ConfigError as error:
        with_fix = f"{error.message} (works with: {error.fix})" if error.fix else error.message
        return "unknown" if "cannot be measured" in error.message else "no", with_fix
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


def row_of(name: str, config: PretrainedConfig, model_class: type[PreTrainedModel]) -> Row:
    def split_of(config: PretrainedConfig) -> tuple[str, str]:
        text = config.get_text_config()
        config = text if isinstance(text, model_class.config_class) else config  # as the library's Auto class does it
        return measure(lambda: probe(model_class, copy.deepcopy(config)))

    split, split_reason = split_of(config)
    if split == "unknown":
        config = with_usual_fields(config)
        split, split_reason = split_of(config)
    packing, packing_reason = measure(lambda: probe_packing(copy.deepcopy(config)))
    sampling, sampling_reason = measure(lambda: check_decoding(copy.deepcopy(config)))
    reasons = (("split", split_reason), ("packing", packing_reason), ("sampling", sampling_reason))
    notes = [f"{what}: {_short(reason)}" for what, reason in reasons if reason]
    return Row(name, model_class.__name__, split, packing, sampling, tuple(notes))


def _short(reason: str, limit: int = 260) -> str:
    text = " ".join(reason.split()).replace("|", "\\|")
    return text if len(text) <= limit else text[: limit - 3] + "..."


def render(rows: list[Row]) -> str:
    totals = {what: Counter(getattr(row, what) for row in rows) for what in CAPABILITIES}
    library, torch_version = transformers.__version__, torch.__version__.split("+")[0]
    intro = f"""# Which model families work

Measured with transformers {library} and torch {torch_version} by `scripts/support_table.py`: every family is built tiny
from its default config. *Split*: three uneven pipeline stages give the log-probs and gradients of the whole model.
*Packing*: packed documents give what separate ones give, in a part that is built and run as in training; where the
family's default configuration needs another attention or other rows, the note says which. *Sampling*: what
`rollout=sampler` draws token by token has the log-probs that the whole sequence has; the library's own generation
(`rollout=hf`) is there for the others. A run probes the user's own config in the same way and refuses what differs, so
this table is information, not a gate. *Unknown*: the tiny copy could not be built or run, so nothing was measured.

Layers that carry a state from token to token (gated delta nets, Mamba, short convolutions, linear attention) are found
by measurement and run document by document through the family's own module. Of a multimodal repository the language
model is built alone; the export is the whole repository with other text weights. What else a checkpoint holds and the
model does not build (layers for multi-token prediction, say) is carried to the export as it is; it is not trained.
"""
    order = {name: index for index, name in enumerate(FIRST)}
    rows = sorted(rows, key=lambda r: (order.get(r.family, len(order)), r.family))
    lines = [
        intro,
        "| | yes | no | unknown |",
        "|---|--:|--:|--:|",
        *(f"| {what} | {c['yes']} | {c['no']} | {c['unknown']} |" for what, c in totals.items()),
        "",
        f"Exact in all: {', '.join(r.family for r in rows if r.split == r.packing == r.sampling == 'yes')}.",
        "",
        "| family | class | split | packing | sampling |",
        "|---|---|---|---|---|",
        *(f"| {r.family} | {r.model_class} | {r.split} | {r.packing} | {r.sampling} |" for r in rows),
        "",
        "## Why not",
        "",
        *(f"- {r.family}: {'; '.join(r.notes)}" for r in rows if r.notes),
    ]
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--families", help="comma-separated model types (default: all)")
    parser.add_argument("--output", type=Path, default=Path("docs/support.md"))
    options = parser.parse_args()
    wanted = options.families.split(",") if options.families else None
    warnings.simplefilter("ignore")
    transformers.logging.set_verbosity_error()
    torch.set_num_threads(1)
    rows = []
    for name, config, model_class in families():
        if wanted is None or name in wanted:
            rows.append(row_of(name, config, model_class))
            print(
                f"{name:28s} split {rows[-1].split:8s} packing {rows[-1].packing:8s} sampling {rows[-1].sampling:8s} "
                f"{'; '.join(rows[-1].notes)[:150]}",
                flush=True,
            )
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(render(rows), encoding="utf-8")


if __name__ == "__main__":
    main()
