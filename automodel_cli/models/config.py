"""Config nodes of the model section: source, storage and adapters of a model. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.fix_syntax import override
from automodel_cli.config.security import trust
from automodel_cli.config.value_checks import check_range
from automodel_cli.models.fp8_config import Fp8Config, TransformerEngineConfig
from automodel_cli.models.lora_config import LoRAConfig
from automodel_cli.models.moe_config import MoEConfig
from automodel_cli.models.mtp_config import MTPConfig
from automodel_cli.models.qat_config import QATConfig, check_qat_model
from automodel_cli.models.tokenizer import PretrainedTokenizer, TokenizerNode
from automodel_cli.models.vision.config import VisionConfig

if TYPE_CHECKING:
    pass

DType = Literal["float32", "bfloat16", "float16"]


@dataclass(frozen=True)
class ModelConfig:
    """An unmodified Hugging Face causal LM.

    Set exactly one source: `pretrained` (hub id or local folder, optionally with `gguf_file` inside it), `gguf_file`
    alone (a path), or `config` (fields of the transformers config with `model_type`; random weights from the run's
    seed).

    - `dtype` is the storage dtype of the parameters, which the optimizer updates. The parallelizer's mixed-precision
      policy sets the compute dtype.
    - `attn_implementation=packed` isolates the documents of a packed sequence exactly, on any device. Other names go to
      transformers ("eager", "sdpa", "flash_attention_2", ...). Packing then requires that they isolate documents, which
      the packing probe tests.
    - `attention_kernel=auto` selects, on CUDA in bfloat16 or float16: FlashAttention-3 (compute capability 9) or 4 (9,
      10) if the package is installed and agrees with the definition, then cuDNN's attention (9, 10; torch 2.15) if it
      agrees, otherwise torch's FlashAttention-2. FlexAttention computes all cases without a flash kernel (soft caps,
      float32, unusual head sizes). On a CPU: torch's flash kernel, and the dense definition for soft caps. Dense
      attention logs a warning with its memory.
    - `flash` (torch's), `fa3`, `fa4` and `flex` are rejected for unsupported cases. `cudnn` leaves layers with windows,
      sinks or heads above 128 to `flash`. `dense` is the definition, tokens x
      tokens. `flex` on a CPU computes the definition slowly, for all documents at once.
    - `trust_remote_code` also needs `--trust remote-code` on the command line.
    - `lm_head_chunk_size=null` keeps one chunk of fp32 logits in the caches of a CPU (1 MiB per thread, up to 24 MiB
      for 256 tokens), and near 512 MiB on other devices. Example: a vocabulary of 128,000 needs 0.5 MiB of fp32 logits
      per token.
    """

    pretrained: str | None = None
    """Hub id or local folder of the weights. Give exactly one of `pretrained`, `config` and a lone `gguf_file`."""
    config: dict[str, Any] | None = None
    """Fields of the transformers config, with `model_type`. The weights are random, by the run's seed."""
    gguf_file: str | None = None
    """A GGUF file: a path, or a name inside `pretrained`."""
    revision: str | None = None
    """Branch, tag or commit of the hub id."""
    trust_remote_code: bool = field(
        default=False, metadata=trust.executes_code(trust.REMOTE_CODE, "runs Python code that comes with the model")
    )
    """Allow transformers to run Python code stored with the weights. Requires `--trust remote-code`."""
    rope_scaling: dict[str, Any] | None = None
    """Scaling of the rotary embeddings of `pretrained`, for longer contexts: `{rope_type: yarn, factor: 4.0}`. Other
    fields are those of transformers' `rope_parameters`. It is exported. null: as the checkpoint sets."""
    dtype: DType = "float32"
    """Storage dtype of the parameters, which the optimizer updates. The parallelizer's `mp_policy` sets the compute
    dtype."""
    attn_implementation: str = field(
        default="packed",
        metadata=trust.executes_code(
            trust.REMOTE_CODE, "loads a kernel from the hub, which is code", lambda name: "/" in name
        ),
    )
    """`packed` isolates the documents of a packed sequence. Other names (`eager`, `sdpa`, ...) select transformers'
    attention, which the packing probe checks."""
    attention_kernel: Literal["auto", "flash", "fa3", "fa4", "cudnn", "flex", "dense"] = "auto"
    """Kernel of packed attention. `auto` selects FlashAttention if it is exact, otherwise FlexAttention. `dense` is
    the definition. Other names require that kernel."""
    tokenizer: str | PretrainedTokenizer | TokenizerNode | None = None
    """Hub id, folder or tokenizer node. null: the tokenizer stored with the weights. `add_tokens` and
    `add_special_tokens` add tokens to it."""
    vision: VisionConfig | None = None
    """Read pictures with the model's vision tower. For recipes of kind vlm. null: text only."""
    lora: LoRAConfig | None = None
    """Low-rank adapters. null: train all parameters."""
    moe: MoEConfig = MoEConfig()  # noqa: RUF009  # frozen
    """Options of mixture-of-experts models."""
    mtp: MTPConfig | None = None
    """Train the multi-token-prediction layers too. null: those of the checkpoint are exported unchanged."""
    transformer_engine: TransformerEngineConfig | None = None
    """Use attention, linear layers and norms of NVIDIA's Transformer Engine. null: torch's."""
    fp8: Fp8Config | None = None
    """Compute linear layers and experts in float8. null: in the compute dtype."""
    qat: QATConfig | None = None
    """Train with fake quantization, and export quantized weights. null: no quantization."""
    lm_head_chunk_size: int | None = None
    """Tokens whose logits are materialized together. null: chosen for the caches of a CPU, or about 512 MiB on a
    GPU."""

    def __post_init__(self) -> None:
        self._check_source()
        self._check_transformer_engine()
        self._check_fp8()
        check_qat_model(self)
        self._check_mtp()
        self._check_expert_adapters()
        self._check_rope()
        self._check_new_tokens()
        check_range("lm_head_chunk_size", self.lm_head_chunk_size, at_least=1, fix="model.lm_head_chunk_size=null")
        if self.attention_kernel != "auto" and (self.attn_implementation != "packed" or self._engine_attends):
            raise ConfigError(
                f"attention_kernel={self.attention_kernel} has no effect, because it selects the kernel of packed "
                "attention, which this config does not use",
                code="no_effect",
                keys=("attention_kernel", "attn_implementation"),
                fix="model.attention_kernel=auto",
            )
        if not self.attn_implementation:
            raise ConfigError(
                "attn_implementation is empty",
                code="empty_value",
                keys=("attn_implementation",),
                fix="model.attn_implementation=packed",
            )

    @property
    def _engine_attends(self) -> bool:
        return self.transformer_engine is not None and self.transformer_engine.attention

    def _check_transformer_engine(self) -> None:
        engine = self.transformer_engine
        if engine is None:
            return
        if engine.attention and self.attn_implementation != "packed":
            raise ConfigError(
                f"attn_implementation={self.attn_implementation} and transformer_engine.attention=true select two "
                "different attention implementations",
                code="mutually_exclusive",
                keys=("attn_implementation", "transformer_engine.attention"),
                fix="model.attn_implementation=packed, or model.transformer_engine.attention=false",
            )
        if engine.linear and self.lora is not None:
            raise ConfigError(
                "lora is not supported with transformer_engine.linear=true, because adapters need torch.nn.Linear",
                code="unsupported_combination",
                keys=("lora", "transformer_engine.linear"),
                fix="model.transformer_engine.linear=false",
            )

    def _check_fp8(self) -> None:
        if self.fp8 is None:
            return
        if self.transformer_engine is not None and self.transformer_engine.linear:
            raise ConfigError(
                "fp8 and transformer_engine.linear=true are mutually exclusive, because both replace linear layers",
                code="mutually_exclusive",
                keys=("fp8", "transformer_engine.linear"),
                fix="model.fp8=null, or model.transformer_engine.linear=false",
            )
        if self.lora is not None and self.lora.quantization != "none":
            raise ConfigError(
                f"fp8 is not supported with lora.quantization={self.lora.quantization}, because the base weights are "
                "stored in 4 bits",
                code="unsupported_combination",
                keys=("fp8", "lora.quantization"),
                fix="model.fp8=null, or model.lora.quantization=none",
            )

    def _check_new_tokens(self) -> None:
        """New rows belong to a table of a checkpoint that this run trains in full."""
        node = self.tokenizer
        if not isinstance(node, PretrainedTokenizer) or not node.new_tokens or self.config is not None:
            return
        key = "tokenizer.add_tokens" if node.add_tokens else "tokenizer.add_special_tokens"
        reasons = {
            "gguf_file": "only safetensors files are read with new rows",
            "mtp": "multi-token prediction layers may hold copies of the tables",
            "vision": "the export keeps the config of a vision-language model",
        }
        for name, reason in reasons.items():
            if getattr(self, name) is not None:
                raise ConfigError(
                    f"{key} is not supported with {name}, because {reason}",
                    code="unsupported_combination",
                    keys=(key, name),
                    fix=f"model.{name}=null",
                )

    def _check_expert_adapters(self) -> None:
        implementation = self.moe.experts_implementation
        if self.lora is not None and self.lora.target_parameters is not None and implementation != "grouped_mm":
            raise ConfigError(
                f"moe.experts_implementation={implementation} is not supported with lora.target_parameters, because "
                "adapters on experts are grouped GEMMs",
                code="unsupported_combination",
                keys=("moe.experts_implementation", "lora.target_parameters"),
                fix="model.moe.experts_implementation=grouped_mm",
            )

    def _check_rope(self) -> None:
        if self.rope_scaling is None:
            return
        if self.pretrained is None or self.gguf_file is not None:
            raise ConfigError(
                "rope_scaling requires a checkpoint in pretrained. Set config.rope_parameters for random weights; GGUF "
                "files keep their own",
                code="requires_setting",
                keys=("rope_scaling", "pretrained"),
                fix="model.rope_scaling=null",
            )
        if "rope_type" not in self.rope_scaling:
            raise ConfigError(
                f"rope_scaling={self.rope_scaling} requires rope_type",
                code="missing_key",
                keys=("rope_scaling",),
                fix="model.rope_scaling.rope_type=yarn",
            )

    def _check_mtp(self) -> None:
        if self.mtp is None:
            return
        if self.lora is not None:
            raise ConfigError(
                "lora is not supported with mtp, because mtp trains all weights of its layers",
                code="unsupported_combination",
                keys=("lora", "mtp"),
                fix="model.mtp=null, or model.lora=null",
            )
        if self.gguf_file is not None:
            raise ConfigError(
                f"gguf_file={self.gguf_file!r} is not supported with mtp, because transformers does not read "
                "multi-token prediction layers from GGUF files",
                code="unsupported_combination",
                keys=("gguf_file", "mtp"),
                fix="model.mtp=null",
            )
        if self.pretrained is not None and self.mtp.depths is not None:
            raise ConfigError(
                f"mtp.depths={self.mtp.depths} has no effect with pretrained={self.pretrained}, because the checkpoint "
                "determines the number of layers",
                code="no_effect",
                keys=("mtp.depths", "pretrained"),
                fix="model.mtp.depths=null",
            )

    def _check_source(self) -> None:
        if self.pretrained is not None and self.config is not None:
            raise ConfigError(
                f"pretrained={self.pretrained!r} and config are mutually exclusive, because each defines the model",
                code="mutually_exclusive",
                keys=("pretrained", "config"),
                fix="model.config=null, or model.pretrained=null",
            )
        if self.pretrained is not None and self.pretrained.endswith(".gguf"):
            self._refuse_file_as_folder(self.pretrained)
        if self.gguf_file is not None and self.config is not None:
            raise ConfigError(
                f"gguf_file={self.gguf_file!r} and config are mutually exclusive, because the file contains its config",
                code="mutually_exclusive",
                keys=("gguf_file", "config"),
                fix="model.config=null",
            )
        if self.pretrained is None and self.config is None and self.gguf_file is None:
            raise ConfigError(
                "no model is set: one of pretrained, config or gguf_file is required",
                code="missing_key",
                keys=("pretrained", "config", "gguf_file"),
                fix="model.pretrained=HuggingFaceTB/SmolLM2-135M-Instruct",
            )
        if self.config is not None and "model_type" not in self.config:
            raise ConfigError(
                "config.model_type is required, because it selects the architecture",
                code="missing_key",
                keys=("config",),
                fix="model.config.model_type=llama",
            )
        if self.config is not None and self.revision is not None:
            raise ConfigError(
                f"revision={self.revision!r} has no effect with config, because the weights are random",
                code="no_effect",
                keys=("revision",),
                fix="model.revision=null",
            )

    @staticmethod
    def _refuse_file_as_folder(path: str) -> None:
        folder, _, name = path.rpartition("/")
        on_hub = folder.count("/") == 1 and not folder.startswith((".", "/", "~"))
        here = f"{override('model.pretrained', folder)} {override('model.gguf_file', name)}" if on_hub else None
        raise ConfigError(
            f"pretrained={path} must be a folder or a hub id, not a file. Set gguf_file to load a GGUF file",
            code="invalid_value",
            keys=("pretrained",),
            fix=here or f"model.pretrained=null {override('model.gguf_file', path)}",
        )
