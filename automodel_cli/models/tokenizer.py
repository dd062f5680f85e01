"""Tokenizers: from a folder, the hub or a GGUF file, or a small one made in code. Torch-free at import."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Protocol

from automodel_cli.config.composition import hub
from automodel_cli.config.errors import ConfigError
from automodel_cli.config.security import trust
from automodel_cli.config.value_checks import check_choice, check_range
from automodel_cli.models.files import file_integrity
from automodel_cli.models.files.gguf_tokenizer import digits_then_words, gguf_path, set_gguf_split

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast


_ROLES = ("system", "user", "assistant", "tool")
PAD, END = "<|pad|>", "<|end|>"

# Each turn is <|role|>content<|end|>, with no other text. The end of an assistant turn is inside the generation tags:
# the stop token that the model must learn, and it is the EOS token.
CHAT_TEMPLATE = (
    "{%- for message in messages -%}"
    "{%- if message['role'] not in ['" + "', '".join(_ROLES) + "'] -%}"
    "{{- raise_exception('unknown role: ' ~ message['role']) -}}"
    "{%- endif -%}"
    "{%- if message['content'] is not string -%}"
    "{{- raise_exception('this chat template renders text only: the content of every message must be a string') -}}"
    "{%- endif -%}"
    "{{- '<|' ~ message['role'] ~ '|>' -}}"
    "{%- if message['role'] == 'assistant' -%}"
    "{%- generation -%}{{- message['content'] ~ '<|end|>' -}}{%- endgeneration -%}"
    "{%- else -%}{{- message['content'] ~ '<|end|>' -}}{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)

# Words with one token in `ByteTokenizer` by default: those of the bundled chat tasks.
_WORDS = """
Add Count Find Give How Larger Put Repeat Reverse Say Sort Spell Subtract Take What Which Write
again and are away backwards digits ends first from in is larger last letter letters many minus
more number of once or order plus reverse sum the to which
"""
COMMON_WORDS = tuple(_WORDS.split())


@dataclass(frozen=True)
class ByteTokenizer:
    """Byte-level tokenizer with a chat template, built without files. Encodes any UTF-8 text losslessly.

    Every byte is a token. Each of `words` is one more token, with and without a leading space. Digits are always
    separate tokens. Other words are encoded byte by byte, so that a small model sees their letters. Padding and end of
    turn (EOS) are two tokens.
    """

    words: tuple[str, ...] = COMMON_WORDS
    """Words that are one token each, with and without a leading space. Every byte is a token too."""

    def __post_init__(self) -> None:
        for word in self.words:
            if not (word.isascii() and word.isalpha()):
                raise ConfigError(
                    f"words contains {word!r}, but words must consist of ASCII letters",
                    code="invalid_value",
                    keys=("words",),
                )

    def build(self) -> PreTrainedTokenizerFast:
        """A fast tokenizer that `save_pretrained` writes and `AutoTokenizer` reads back."""
        from tokenizers import Tokenizer, decoders, models
        from tokenizers.pre_tokenizers import ByteLevel
        from transformers import PreTrainedTokenizerFast

        special = [PAD, END, *(f"<|{role}|>" for role in _ROLES)]
        words = [prefix + word for word in dict.fromkeys(self.words) for prefix in ("", "Ġ") if len(prefix + word) > 1]
        vocab = {token: i for i, token in enumerate([*special, *sorted(ByteLevel.alphabet()), *words])}
        # No merges: with `ignore_merges`, a word in the vocabulary is one token and every other word is split
        # to bytes.
        tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[], ignore_merges=True))
        tokenizer.pre_tokenizer, tokenizer.decoder = digits_then_words(), decoders.ByteLevel()
        fast = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            pad_token=PAD,
            eos_token=END,
            extra_special_tokens=special[2:],
            clean_up_tokenization_spaces=False,
        )
        fast.chat_template = CHAT_TEMPLATE
        return fast


@dataclass(frozen=True)
class PretrainedTokenizer:
    """A tokenizer from a hub id or a folder, optionally with another chat template and new tokens.

    `chat_template` is the template text or the path of a `.jinja` file. It replaces the tokenizer's template and is
    saved with the export. (`data.chat_template` changes only the rendering of training rows.) `gguf_file` is a file
    inside the folder.

    New tokens grow the embedding and the head of `model.pretrained`, and the config of the export. If the checkpoint
    has unused rows behind its last token, new tokens use these first.
    """

    pretrained: str | None = None
    """Hub id or folder of the tokenizer. null: the tokenizer stored with the weights."""
    revision: str | None = None
    """Branch, tag or commit of the hub id."""
    trust_remote_code: bool = field(
        default=False, metadata=trust.executes_code(trust.REMOTE_CODE, "runs Python code that comes with the tokenizer")
    )
    """Allow Python code stored with the tokenizer to run."""
    gguf_file: str | None = None
    """A GGUF file inside the folder, to read the tokenizer from."""
    chat_template: str | None = None
    """Template text or path of a `.jinja` file. It replaces the tokenizer's own and is exported."""
    add_tokens: tuple[str, ...] = ()
    """New tokens in the text of rows and responses, for example `<think>` or the words of a domain. Tokens that the
    tokenizer has already keep their rows."""
    add_special_tokens: tuple[str, ...] = ()
    """New control tokens, for example of a chat template. Decoding can skip them, and in the text of rows they are
    treated as `data.special_tokens_policy` selects."""
    init_new_tokens: Literal["pieces", "mean"] = "pieces"
    """First value of the rows of a new token: mean of the tokens into which the old tokenizer splits its text
    (`pieces`), or of all old tokens (`mean`)."""
    pad_to_multiple_of: int = 64
    """Multiple to which a vocabulary that grows is rounded up. Tensor parallelism shards it if `mesh.tp_size` divides
    it. The rows beyond the last token belong to no token."""

    def __post_init__(self) -> None:
        check_choice(
            "init_new_tokens", self.init_new_tokens, ("pieces", "mean"), fix="model.tokenizer.init_new_tokens=pieces"
        )
        check_range(
            "pad_to_multiple_of", self.pad_to_multiple_of, at_least=1, fix="model.tokenizer.pad_to_multiple_of=64"
        )
        self._check_new_tokens()
        if (
            self.chat_template is not None
            and "{" not in self.chat_template
            and not self.chat_template.endswith(".jinja")
        ):
            raise ConfigError(
                f"chat_template={self.chat_template!r} must be a template (with {{{{ or {{%) or a .jinja file",
                code="invalid_value",
                keys=("chat_template",),
            )

    @property
    def new_tokens(self) -> tuple[str, ...]:
        """All tokens of `add_tokens` and `add_special_tokens`."""
        return (*self.add_tokens, *self.add_special_tokens)

    def build(self) -> PreTrainedTokenizerBase:
        """Raises ConfigError when the source has no readable tokenizer or the template file does not exist."""
        tokenizer = self.without_new_tokens()
        tokenizer.add_tokens(list(self.add_tokens))
        tokenizer.add_tokens(list(self.add_special_tokens), special_tokens=True)
        if self.chat_template is not None:
            tokenizer.chat_template = _read_template(self.chat_template)
        return tokenizer

    def without_new_tokens(self) -> PreTrainedTokenizerBase:
        """Return the stored tokenizer. Raises ConfigError if there is none."""
        if self.pretrained is None:
            raise ConfigError(
                "tokenizer.pretrained is required with model.config, because random weights come without a tokenizer",
                code="missing_key",
                keys=("tokenizer.pretrained",),
                fix="model.tokenizer.pretrained=<a folder with tokenizer.json, or a hub id>",
            )
        return _load(self.pretrained, self.gguf_file, self.revision, self.trust_remote_code)

    def _check_new_tokens(self) -> None:
        tokens = self.new_tokens
        repeated = sorted({token for token in tokens if tokens.count(token) > 1})
        if repeated or not all(token.strip() for token in tokens):
            reason = f"contain {repeated[0]!r} twice" if repeated else "contain an empty token"
            raise ConfigError(
                f"add_tokens and add_special_tokens {reason}",
                code="invalid_value",
                keys=("add_tokens", "add_special_tokens"),
            )


class TokenizerNode(Protocol):
    """Interface of a node in `model.tokenizer`."""

    @abstractmethod
    def build(self) -> PreTrainedTokenizerBase:
        """The tokenizer, with a chat template if it is meant for chats."""
        ...


class _ModelSection(Protocol):
    """The fields of the model section that locate a tokenizer."""

    @property
    def tokenizer(self) -> TokenizerNode | str | None: ...
    @property
    def pretrained(self) -> str | None: ...
    @property
    def gguf_file(self) -> str | None: ...
    @property
    def revision(self) -> str | None: ...
    @property
    def trust_remote_code(self) -> bool: ...


def tokenizer_node(config: _ModelSection) -> PretrainedTokenizer | None:
    """Return the node of a section that reads a stored tokenizer, with its source. None for other nodes."""
    choice = config.tokenizer
    if not isinstance(choice, PretrainedTokenizer) or choice.pretrained is not None:
        return choice if isinstance(choice, PretrainedTokenizer) else None
    if config.pretrained is None:
        return choice
    return replace(
        choice,
        pretrained=config.pretrained,
        revision=config.revision,
        trust_remote_code=config.trust_remote_code,
    )


def load_tokenizer(config: _ModelSection) -> PreTrainedTokenizerBase:
    """Load the tokenizer of the model section: a node, a hub id or folder, or (None) the one next to the weights.

    Raises ConfigError if there is none, if it cannot be read, or if the word splitting of a GGUF file is unknown.
    """
    choice = config.tokenizer
    if isinstance(choice, str):
        return _load(choice, None, None, config.trust_remote_code)
    if choice is not None:
        built: PreTrainedTokenizerBase = (tokenizer_node(config) or choice).build()
        return built
    if config.gguf_file is not None and config.pretrained is None:
        file = Path(config.gguf_file)
        return _load(str(file.parent), file.name, None, False)
    if config.pretrained is not None:
        return _load(config.pretrained, config.gguf_file, config.revision, config.trust_remote_code)
    raise no_tokenizer()


def no_tokenizer() -> ConfigError:
    """Return the error for a model section with neither a tokenizer nor weights that have one."""
    return ConfigError(
        "model.tokenizer is required with model.config, because random weights come without a tokenizer",
        code="missing_key",
        keys=("model.tokenizer",),
        fix="model.tokenizer='{_target_: automodel_cli.models.tokenizer.ByteTokenizer}'",
    )


def _load(source: str, gguf_file: str | None, revision: str | None, trust_remote_code: bool) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer

    options = {"revision": revision} if revision is not None else {}
    if gguf_file is not None:
        options["gguf_file"] = gguf_file
    if gguf_file is None:
        file_integrity.check_json(source)
    try:
        tokenizer = AutoTokenizer.from_pretrained(source, trust_remote_code=trust_remote_code, **options)
    except Exception as error:  # tokenizers raises plain Exception for a file of another form
        file_integrity.refuse_adapter(Path(source))
        if not Path(source).exists() and hub.is_offline(error):
            message = f"the tokenizer of {source} cannot be loaded: {hub.not_here(source)}"
            raise ConfigError(
                message, code="model_not_found", keys=("tokenizer",), fix=hub.download(source, revision)
            ) from error
        where = f"{source}, {gguf_file}" if gguf_file is not None else source
        raise ConfigError(
            f"the tokenizer of {where} cannot be loaded: {error}",
            code="model_not_found",
            keys=("tokenizer",),
            fix="model.tokenizer=<a folder with tokenizer.json, or a hub id>",
        ) from error
    if gguf_file is not None:
        set_gguf_split(tokenizer, gguf_path(source, gguf_file, revision))
    return tokenizer


def _read_template(choice: str) -> str:
    if "{" in choice:
        return choice
    file = Path(choice)
    if not file.is_file():
        raise ConfigError(
            f"chat_template={choice} does not exist in {Path.cwd()}",
            code="missing_file",
            keys=("tokenizer.chat_template",),
        )
    return file.read_text(encoding="utf-8")
