"""The difference between an export and the trained model, as `run/export.py` measures it, and log-probs of tokens."""

from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import peft
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from automodel_cli.data.batch import one_document
from automodel_cli.distributed import process_group
from automodel_cli.models.builder import build_part
from automodel_cli.models.checkpoint_io.export import export_hf, rounds_weights, trained_values
from automodel_cli.models.checkpoint_io.export_check import Precision, measure_export_error
from automodel_cli.models.checkpoint_io.load import load_weights
from automodel_cli.models.config import ModelConfig
from automodel_cli.models.lora import export as lora_export
from automodel_cli.models.lora_config import LoRAConfig
from automodel_cli.models.model_part import ModelPart


def verify_export(directory, parts, prompts) -> float:
    """Reload the folder with transformers and return the largest difference of log-probs on token ids. Collective."""
    token_ids = [list(prompt) for prompt in prompts]
    trained_side = trained_values(parts, token_ids)
    precision = Precision(parts[0].model.dtype, rounds_weights=rounds_weights(parts))
    work = partial(measure_export_error, Path(directory), token_ids, trained_side, precision)
    return process_group.from_first_rank(work, timedelta(minutes=60)).worst


def adapted_part(base: Path, config: LoRAConfig, dtype: Any = "float32") -> tuple[ModelPart, ModelConfig]:
    """Return a part with adapters on the weights of a folder, in evaluation, and its model section."""
    model = ModelConfig(pretrained=str(base), lora=config, dtype=dtype)
    part = build_part(model)
    load_weights(part, model, device="cpu", seed=0)
    return part.eval(), model


def logprobs_of_files(
    part: ModelPart, model: ModelConfig, base: PreTrainedModel, folder: Path, ids: list[int]
) -> tuple[Tensor, Tensor]:
    """Write `folder/adapter` and `folder/merged`. Return log-probs of peft on `base`, and of the merged model."""
    assert model.lora is not None
    lora_export.save_adapters([part], model.lora, folder / "adapter", base_model=str(model.pretrained), write=True)
    export_hf([part], model, None, folder / "merged", title="t")
    merged = AutoModelForCausalLM.from_pretrained(folder / "merged").eval()
    theirs = logprobs_of(peft.PeftModel.from_pretrained(base, folder / "adapter").eval(), ids)
    return theirs, logprobs_of(merged, ids)


@torch.no_grad()
def nudged(part: ModelPart) -> ModelPart:
    """Add noise to every trained parameter."""
    generator = torch.Generator().manual_seed(0)
    for param in part.parameters():
        if param.requires_grad:
            param.add_(torch.randn(param.shape, generator=generator, dtype=param.dtype), alpha=0.05)
    return part


@torch.no_grad()
def logprobs_of(model: Any, ids: list[int]) -> Tensor:
    """Return the log-probs of the tokens after the first, by a part or a model of transformers or peft."""
    if isinstance(model, ModelPart):
        batch = one_document(ids)
        return model(labels=batch.labels_BT, **batch.model_inputs()).logprobs_BT[0, :-1]
    row = torch.tensor([ids])
    return model(row).logits.log_softmax(-1)[0, :-1].gather(-1, row[0, 1:, None])[:, 0]
