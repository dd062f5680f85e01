"""Tokens of documents without a chat template: plain text, and prompts with completions."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from automodel_cli.data.chat.special_tokens import SpecialText
from automodel_cli.data.encoding.encode_spec import EncodeSpec
from automodel_cli.data.encoding.infill import after_anchor, anchored
from automodel_cli.data.fill_in_the_middle import MOVED, TOO_LONG, UNCHANGED
from automodel_cli.data.formats.examples import AnsweredPrompt, PlainText
from automodel_cli.data.row_errors import RowError, attempt, unwrap
from automodel_cli.data.tokenized import Encoded, around

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Ids = np.ndarray | RowError
"""Token ids, int32, or the error of their row."""


class TextEncoder:
    """Encoder of texts. Picklable, for worker processes."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, spec: EncodeSpec, special: SpecialText):
        """`special`: special tokens in the texts."""
        self.tokenizer, self.spec, self.special = tokenizer, spec, special

    def texts(self, documents: Sequence[PlainText]) -> list[Encoded | RowError]:
        """Encode `[BOS] text EOS`, with BOS if the tokenizer adds one. All tokens are trained."""
        encoded = self._encode([document.text for document in documents])
        usable = {i: documents[i].text for i, (ids, _) in enumerate(encoded) if not isinstance(ids, RowError)}
        moved = self._moved(usable)
        return [attempt(self._text, ids, count, moved.get(i)) for i, (ids, count) in enumerate(encoded)]

    def _text(self, plain: Ids, count: int, moved: Ids | None) -> Encoded:
        ids, infill = self._ended(unwrap(plain), unwrap(moved))
        trained = np.ones(len(ids), np.uint8)
        trained[self._own_end(ids) :] = 0
        return Encoded(ids, trained, num_special=count, infill=infill)

    def _ended(self, plain: np.ndarray, moved: np.ndarray | None) -> tuple[np.ndarray, int]:
        """Return the tokens of a document with EOS, and `MOVED`, `UNCHANGED` or `TOO_LONG`."""
        if moved is not None and self.spec.infill is not None:
            ids, most = self._with_eos(moved), self.spec.infill.max_tokens
            if most is None or len(ids) <= most:
                return ids, MOVED
        return self._with_eos(self._without_eos(plain)), UNCHANGED if moved is None else TOO_LONG

    def _moved(self, texts: Mapping[int, str]) -> dict[int, Ids]:
        """Return the tokens of the documents whose middle is moved to the end, by their places. Without EOS."""
        spec = self.spec.infill
        if spec is None:
            return {}
        splits = {place: split for place, text in texts.items() if (split := spec.split(text)) is not None}
        parts = [part for split in splits.values() for part in split[:3]]
        found: list[Ids]
        if self._is_anchored:
            found = [*after_anchor(self.tokenizer, spec, parts)]
        else:
            found = [ids for ids, _ in self._encode(parts, add_special_tokens=False)]
        begin = np.array(around(self.tokenizer)[0] if self.spec.add_bos else [], np.int32)

        def arranged(of_text: Sequence[Ids], is_spm: bool) -> np.ndarray:
            return np.concatenate([begin, spec.arranged([unwrap(part) for part in of_text], is_spm=is_spm)])

        return {
            place: attempt(arranged, found[3 * number : 3 * number + 3], split[3])
            for number, (place, split) in enumerate(splits.items())
        }

    @cached_property
    def _is_anchored(self) -> bool:
        assert self.spec.infill is not None, "only called with fill-in-the-middle"
        return anchored(self.tokenizer, self.spec.infill)

    def _encode(self, texts: Sequence[str], *, add_special_tokens: bool | None = None) -> list[tuple[Ids, int]]:
        """Return token ids of complete texts and the number of special tokens in each."""
        return self.special.encode_texts(texts, self.spec.add_bos if add_special_tokens is None else add_special_tokens)

    def completions(self, pairs: Sequence[AnsweredPrompt]) -> list[Encoded | RowError]:
        """Encode `[BOS] prompt completion EOS`. The completion and EOS are trained.

        If the tokens of the prompt are a prefix of the tokens of the concatenated text, the text is encoded at once.
        Otherwise prompt and completion are encoded separately, because the model will see the tokens of the prompt
        alone at inference. If the separate tokens decode to another text, the row is rejected.
        """
        wholes = self._encode([p.prompt + p.completion for p in pairs])
        prompts = self._encode([p.prompt for p in pairs])
        rests = self._encode([p.completion for p in pairs], add_special_tokens=False)
        return [attempt(self._completion, *each) for each in zip(pairs, wholes, prompts, rests, strict=True)]

    def _completion(
        self, pair: AnsweredPrompt, whole: tuple[Ids, int], of_prompt: tuple[Ids, int], rest: tuple[Ids, int]
    ) -> Encoded:
        full_ids, prompt, completion = (unwrap(ids) for ids, _ in (whole, of_prompt, rest))
        prompt, full_ids = self._without_eos(prompt), self._with_eos(self._without_eos(full_ids))
        ids = full_ids
        if not np.array_equal(full_ids[: len(prompt)], prompt):
            ids = self._with_eos(np.concatenate([prompt, completion]))
            if self.tokenizer.decode(ids) != self.tokenizer.decode(full_ids):
                where = f"{pair.prompt[-12:]!r} + {pair.completion[:12]!r}"
                raise RowError(
                    "not_a_prefix",
                    f"a token crosses the end of the prompt ({where})",
                    fix="end the prompt with a newline, or begin the completion with a space",
                )
        trained = np.ones(len(ids), np.uint8)
        trained[: len(prompt)] = self.spec.mask == "all"
        trained[self._own_end(ids) :] = 0
        return Encoded(ids, trained, num_special=whole[1])

    def _with_eos(self, ids: np.ndarray) -> np.ndarray:
        eos = self.tokenizer.eos_token_id
        if not self.spec.add_eos or eos is None or (len(ids) and ids[-1] == eos):
            return ids
        return np.append(ids, np.int32(eos))

    def _without_eos(self, ids: np.ndarray) -> np.ndarray:
        """Remove the EOS that the tokenizer appends to every text. An EOS in the text of the row is kept."""
        return ids[:-1] if self.spec.add_bos and self._tokenizer_adds_eos else ids

    def _own_end(self, ids: np.ndarray) -> int:
        """Return the end of the trained tokens. White space after an EOS of the row itself is not trained."""
        if self.spec.add_eos or self.tokenizer.eos_token_id is None:
            return len(ids)
        positions = np.flatnonzero(ids == self.tokenizer.eos_token_id)
        if not len(positions):
            return len(ids)
        end = int(positions[-1]) + 1
        return len(ids) if str(self.tokenizer.decode(ids[end:])).strip() else end

    @cached_property
    def _tokenizer_adds_eos(self) -> bool:
        return around(self.tokenizer)[1] == [self.tokenizer.eos_token_id]
