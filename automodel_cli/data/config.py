"""The `data:` section of a config. Plain nodes: building one reads no file and imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from automodel_cli.config.errors import ConfigError
from automodel_cli.config.value_checks import check_range
from automodel_cli.data.data_sources import DataSources
from automodel_cli.data.fill_in_the_middle import FillInTheMiddle
from automodel_cli.data.formats.base import KINDS, DataKind
from automodel_cli.data.formats.builtin import find_format, format_name
from automodel_cli.data.source_config import check_format
from automodel_cli.data.stream_config import StreamConfig

Packing = Literal["best_fit", "wrapped", "none"]
LongDocuments = Literal["split", "truncate", "drop", "error"]
LongChoice = Literal["auto", "split", "truncate", "drop", "error"]
Mask = Literal["assistant", "last_turn", "all"]
Turns = Literal["auto", "single", "per_turn"]
SpecialTokensInText = Literal["auto", "as_text", "keep", "refuse"]


_WORDS: dict[DataKind, str] = {
    "documents": "conversations and texts",
    "preferences": "preference data",
    "labeled": "labeled texts",
    "groups": "queries with passages",
}


@dataclass(frozen=True)
class DataConfig(DataSources):
    """Training data and its conversion to token sequences. Set exactly one of `path`, `datasets` and `generator`.

    - Validation: set at most one of `validation_size`, `validation_path` and `validation_split`. A generator has its
      own validation rows.
    - `truncation=auto` splits plain text, truncates chats and prompts with completions, and drops pairs and prompts for
      sampling. Later pieces of a chat would be trained without their beginning. `packing=wrapped` splits every document
      and accepts only `split`.
    - Turns: each trained turn follows the text that the model sees at inference: the rendering of the earlier messages
      with a generation prompt. `multi_turn=auto` keeps a conversation as one document if this holds for all its turns.
      Otherwise it makes one document per trained turn, each with its history. `single` with `chat_template=auto` uses a
      bundled training template if the tokenizer's template rewrites earlier turns (docs/guides/chat_templates.md).
      Preference rows hold two documents each, so only their last turn can be trained separately.
    - Special tokens in the text of rows (`<|im_end|>` in a question): `as_text` trains their characters, while those of
      the chat template stay control tokens. `keep` makes control tokens of them, `refuse` rejects the row. `auto` is
      `as_text` for conversations, and `keep` for rows without a template. Rows of slow tokenizers, which cannot
      distinguish the two, are rejected. The report counts them.
    - Unused columns: a column or key that would affect training but is not read (`label`, `rejected`, `images`,
      `loss_weight`, unknown keys of a message) rejects its row, unless `ignored_columns` lists it. Other columns (`id`,
      `source`) are only reported.
    """

    seq_len: int = 2048
    """Tokens per sequence."""
    packing: Packing = "best_fit"
    """How documents fill sequences: `best_fit` (unsplit documents), `wrapped` (concatenated and split at `seq_len`)
    or `none` (one per sequence, padded)."""
    cross_documents: bool = False
    """Documents of a sequence see each other, and the first token of each is a label, as in nanoGPT and in Megatron by
    default. Requires `packing=wrapped` and plain text or tokens. false: documents are separate."""
    fill_in_the_middle: FillInTheMiddle | None = None
    """Move the middle of a share of the documents to their ends, for code completion: `{rate: 0.5, mode: psm}`.
    Requires plain text; a dataset of `datasets` is excluded by its own `fill_in_the_middle=false`."""
    truncation: LongChoice = "auto"
    """Treatment of documents longer than `seq_len`: `split`, `truncate`, `drop` or `error`. `auto` splits text,
    truncates chats, and drops pairs and prompts."""
    padding: Literal["longest", "seq_len"] = "longest"
    """Length of unpacked sequences: the `longest` of their microbatch, or `seq_len`."""
    pad_to_multiple_of: int = 1
    """Round the length of unpacked sequences up to a multiple of this."""
    loss_mask: Mask = "assistant"
    """Tokens with loss: every `assistant` turn, the `last_turn` only, or `all` tokens."""
    multi_turn: Turns = "auto"
    """`single` keeps a conversation in one document. `per_turn` makes one document per trained turn. `auto` selects
    `per_turn` if the chat template rewrites earlier turns."""
    chat_template: str | None = "auto"
    """`auto` and `tokenizer` use the tokenizer's template, `none` uses none. Other values are a file or the
    template text."""
    on_invalid_row: Literal["fail", "drop"] = "fail"
    """`fail` stops and lists all invalid rows. `drop` skips them, up to `max_invalid_fraction`."""
    max_invalid_fraction: float = 0.01
    """Largest fraction of invalid rows that `on_invalid_row=drop` accepts."""
    special_tokens_policy: SpecialTokensInText = "auto"
    """Treatment of special-token strings in user text: as plain text, as the control token, or as an error."""
    ignored_columns: list[str] = field(default_factory=list)
    """Columns to ignore although they could affect training."""
    add_bos: bool = True
    """Add the tokenizer's BOS to texts, and to prompts without a chat template. false: the rows contain it."""
    add_eos: bool = True
    """End texts, and completions without a chat template, with EOS. false: the rows contain it, and white space
    after it has no loss."""
    media_dir: str | None = None
    """Folder of relative picture paths. null: the folder of `path`, or the working directory. For recipes of kind
    vlm."""
    max_image_pixels: int = 50_000_000
    """Largest number of pixels of a picture file. Rows with larger ones are invalid. For recipes of kind vlm."""
    picture_memory_gib: float = 4.0
    """Host memory for processed pictures that wait for their microbatch, for each rank [GiB]. Reading pauses at the
    limit. 0 reads one microbatch ahead. For recipes of kind vlm."""
    cache_dir: str | None = None
    """Folder of prepared data. null: `$AUTOMODEL_CACHE`, otherwise the user's cache folder."""
    num_workers: int | None = None
    """Tokenization processes. 0: the main process. null: by the number of cores."""
    shuffle: bool = True
    """Shuffle the data in each epoch."""
    streaming: StreamConfig | None = None
    """Read the rows while the run trains: `data.streaming={}`. null: prepare all rows before the first step."""
    start_after: int | None = None
    """Start when `automodel data prepare` has tokenized this many shards of each dataset, and read later shards as they
    are prepared. Shards are shuffled in groups of this size. Requires `streaming`. null: a streamed run tokenizes its
    rows itself."""

    def __post_init__(self) -> None:
        self.check_origin()
        self.check_validation()
        self._check_streaming()
        self._check_numbers()
        self._check_turns()
        self._check_infill()
        check_format(self.format, self.column_mapping)
        self.mixture()  # raises for weights that do not fit together

    def _check_streaming(self) -> None:
        if self.start_after is not None and self.streaming is None:
            raise ConfigError(
                f"start_after={self.start_after} requires streaming",
                code="requires_setting",
                keys=("start_after", "streaming"),
                fix="data.streaming={}",
            )
        check_range("start_after", self.start_after, at_least=1)
        if self.streaming is None:
            return
        if self.generator is not None:
            raise ConfigError(
                "streaming is not supported with generator, whose rows are in memory",
                code="unsupported_combination",
                keys=("streaming", "generator"),
                fix="data.streaming=null",
            )
        if self.validation_size:
            raise ConfigError(
                f"validation_size={self.validation_size:g} is not supported with streaming, because the number of rows "
                "is unknown",
                code="unsupported_combination",
                keys=("validation_size", "streaming"),
                fix="data.validation_size=0 data.validation_path=<a file of held-out rows>",
            )
        if self.num_workers is not None and self.start_after is None:
            raise ConfigError(
                f"num_workers={self.num_workers} has no effect with streaming, which tokenizes in threads",
                code="no_effect",
                keys=("num_workers", "streaming"),
                fix=f"data.num_workers=null data.streaming.num_threads={max(1, self.num_workers)}",
            )
        sources = self.datasets or []
        if len(sources) > 1 and any(source.sampling_weight is None for source in sources):
            raise ConfigError(
                "streaming of several datasets requires sampling_weight for each, because the length of an epoch is "
                "unknown",
                code="requires_setting",
                keys=("datasets", "streaming"),
                fix=" ".join(f"data.datasets.{i}.sampling_weight=1.0" for i in range(len(sources))),
            )
        if any(source.epochs != 1 for source in sources):
            raise ConfigError(
                "epochs of a dataset has no effect with streaming: sampling_weight decides how often it is drawn",
                code="no_effect",
                keys=("datasets", "streaming"),
                fix="remove epochs from data.datasets",
            )

    def _check_turns(self) -> None:
        if self.multi_turn == "per_turn" and self.loss_mask == "all":
            raise ConfigError(
                "multi_turn=per_turn is not supported with loss_mask=all, because it repeats earlier turns, which "
                "would be trained several times",
                code="unsupported_combination",
                keys=("multi_turn", "loss_mask"),
                fix="data.multi_turn=single, or data.loss_mask=assistant",
            )

    def _check_infill(self) -> None:
        if self.fill_in_the_middle is not None and not (self.add_bos and self.add_eos):
            name = "add_eos" if self.add_bos else "add_bos"
            raise ConfigError(
                f"{name}=false is not supported with fill_in_the_middle, because the token in the text of a row would "
                "be moved with its part",
                code="unsupported_combination",
                keys=(name, "fill_in_the_middle"),
                fix=f"data.{name}=true, or data.fill_in_the_middle=null",
            )
        if self.datasets and not self.fill_in_the_middle and not all(s.fill_in_the_middle for s in self.datasets):
            raise ConfigError(
                "fill_in_the_middle=false of a dataset has no effect without data.fill_in_the_middle",
                code="no_effect",
                keys=("datasets",),
                fix="data.fill_in_the_middle='{rate: 0.5}'",
            )

    def _check_numbers(self) -> None:
        check_range("seq_len", self.seq_len, at_least=2, fix="data.seq_len=2048")
        check_range("pad_to_multiple_of", self.pad_to_multiple_of, at_least=1)
        if self.packing != "none" and self.padding != "longest":
            raise ConfigError(
                f"padding={self.padding} has no effect with packing={self.packing}, which pads to seq_len",
                code="no_effect",
                keys=("padding", "packing"),
                fix="data.packing=none, or remove data.padding",
            )
        padded_to_seq_len = self.packing != "none" or self.padding == "seq_len"
        if padded_to_seq_len and self.seq_len % self.pad_to_multiple_of:
            raise ConfigError(
                f"seq_len={self.seq_len} is not a multiple of pad_to_multiple_of={self.pad_to_multiple_of}",
                code="not_divisible",
                keys=("seq_len", "pad_to_multiple_of"),
                fix=f"data.seq_len={-(-self.seq_len // self.pad_to_multiple_of) * self.pad_to_multiple_of}",
            )
        if self.packing == "wrapped" and self.truncation not in ("auto", "split"):
            raise ConfigError(
                f"truncation={self.truncation} is not supported with packing=wrapped, which splits documents at the "
                "end of each sequence",
                code="unsupported_combination",
                keys=("packing", "truncation"),
                fix=f"{self.keep_whole(self.truncation)}, or data.truncation=split (texts and chats without pictures)",
            )
        if self.cross_documents and self.packing != "wrapped":
            raise ConfigError(
                f"cross_documents=true requires packing=wrapped, which keeps the order of documents, but packing is "
                f"{self.packing}",
                code="requires_setting",
                keys=("cross_documents", "packing"),
                fix="data.packing=wrapped, or data.cross_documents=false",
            )
        fix = "data.max_invalid_fraction=0.01"
        check_range("max_invalid_fraction", self.max_invalid_fraction, at_least=0, at_most=1, fix=fix)
        check_range("max_image_pixels", self.max_image_pixels, at_least=1, fix="data.max_image_pixels=50_000_000")
        check_range("picture_memory_gib", self.picture_memory_gib, at_least=0, fix="data.picture_memory_gib=4")
        check_range("num_workers", self.num_workers, at_least=0, note=" (0 tokenizes in the main process)")

    def check_kind(self, kind: DataKind) -> None:
        """Raise for formats of another kind, and for settings that do not fit preference rows or labeled rows."""
        for fmt in (self.format, *(source.format for source in self.datasets or ())):
            if fmt != "auto" and find_format(fmt).makes not in KINDS[kind]:
                raise ConfigError(
                    f"format={format_name(find_format(fmt))} is not supported, because the recipe trains on "
                    f"{_WORDS[kind]}",
                    code="wrong_data_kind",
                    keys=("data.format",),
                    fix="data.format=auto, or a recipe of the other kind",
                )
        if kind != "documents" and self.fill_in_the_middle is not None:
            raise ConfigError(
                f"fill_in_the_middle is not supported for {_WORDS[kind]}, because it applies to plain text",
                code="wrong_data_kind",
                keys=("data.fill_in_the_middle",),
                fix="data.fill_in_the_middle=null",
            )
        if kind == "documents":
            return
        is_labeled = kind == "labeled"
        if self.packing == "wrapped" or self.truncation in (("split",) if is_labeled else ("split", "truncate")):
            why = "a part has no label of its own" if is_labeled else "parts cannot be compared"
            raise ConfigError(
                f"packing={self.packing} with truncation={self.truncation} is not supported for {_WORDS[kind]}, "
                f"because it splits texts, and {why}",
                code="unsupported_combination",
                keys=("data.packing", "data.truncation"),
                fix=self.keep_whole("truncate" if is_labeled else "drop"),
            )
        if is_labeled:
            return
        if self.loss_mask == "all":
            raise ConfigError(
                "loss_mask=all is not supported for preference data, because only responses are compared",
                code="unsupported_combination",
                keys=("data.loss_mask",),
                fix="data.loss_mask=assistant",
            )

    def keep_whole(self, truncation: LongChoice) -> str:
        """Return the overrides with this `truncation` that put no document into two sequences."""
        also = {"data.packing=best_fit": self.packing == "wrapped", "data.cross_documents=false": self.cross_documents}
        also[f"data.truncation={truncation}"] = truncation != self.truncation
        return " ".join(override for override, is_needed in also.items() if is_needed)

    def long_choice(self, *, is_text: bool, preferences: bool) -> LongDocuments:
        """Resolve `truncation` for plain text, for other rows, and for preference rows."""
        if self.truncation != "auto":
            return self.truncation
        if preferences:
            return "drop"
        return "split" if is_text or self.packing == "wrapped" else "truncate"
