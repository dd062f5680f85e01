"""Built-in sampler: continuous batching on the model that is being trained, without a copy.

A finished sequence frees its slot for the next prompt. A prompt runs once for all of its consecutive samples. If they
do not all get a slot, an extra slot keeps its cache. Log-probs come from the same forward, weights and head that
training uses, so both agree up to rounding. Supports every model that `Decoder` supports: unsharded, FSDP, expert- or
pipeline-parallel, CPU and CUDA.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from automodel_cli.config.value_checks import check_range
from automodel_cli.config.warn import warn
from automodel_cli.distributed.expert_parallel.router_replay import RouterRecorder, choosing
from automodel_cli.rollout.engines.base import Capabilities, resolve_seeds
from automodel_cli.rollout.engines.sampler.active_samples import ActiveSample, SharedPrompt, next_prefill
from automodel_cli.rollout.engines.sampler.cuda_graphs import Capture, DecodeGraphs, GraphsFailed
from automodel_cli.rollout.engines.sampler.decoder import Decoder
from automodel_cli.rollout.engines.sampler.kv_cache import Decode, KVCache, Prefill, WholeAttention
from automodel_cli.rollout.engines.sampler.recurrent_cache import StateSlots
from automodel_cli.rollout.engines.sampler.sampling import sample_tokens, streams
from automodel_cli.rollout.types import Completion, SamplingParams, WeightStream


class Sampler:
    """Generate completions with the current weights.

    Args:
        whole_attention: attention of prompts (`models.attention.packed_attention`, as in training).
        max_num_seqs: sequences that are decoded together. The cache has this number times the longest sequence, and
            one more if the samples of a prompt outnumber the slots.
        max_num_batched_tokens: maximum prompt tokens of one forward. A longer prompt runs alone.
        refill_threshold: share of slots that must be free before new prompts start, because a forward of several
            prompts costs little more than of one.
        capture: captures decoding steps (`cuda_graphs.py`). None runs them eagerly.
    """

    capabilities = Capabilities(logprobs=True, weight_updates=True, live_weights=True, routing=True)

    def __init__(
        self,
        decoder: Decoder,
        whole_attention: WholeAttention,
        *,
        stop_token_ids: Sequence[int],
        max_num_seqs: int = 32,
        max_num_batched_tokens: int = 8192,
        refill_threshold: float = 0.125,
        capture: Capture | None = None,
    ):
        check_range("max_num_seqs", max_num_seqs, at_least=1)
        check_range("max_num_batched_tokens", max_num_batched_tokens, at_least=1)
        check_range("refill_threshold", refill_threshold, at_least=0, at_most=1)
        self.decoder = decoder
        self.stop_token_ids = frozenset(stop_token_ids)
        self.max_num_seqs, self.max_num_batched_tokens = max_num_seqs, max_num_batched_tokens
        self.weight_version = 0
        self.about = ""
        """Text for the startup summary."""
        self._layers: tuple[int, ...] = ()
        self._refill = max(1, int(max_num_seqs * refill_threshold))
        self._cache = KVCache(max_num_seqs, whole_attention)
        self._states = StateSlots(max_num_seqs, decoder.new_cache)
        self._shared: SharedPrompt | None = None
        self._capture = capture
        self._graphs: DecodeGraphs | None = None

    def update_weights(self, stream: WeightStream) -> None:
        """The weights are the trained parameters: only the version changes, and the stream is not read."""
        self.weight_version += 1

    def state_bytes(self) -> int:
        """Return the bytes of recurrent state per sequence on this rank, measured with one token. Collective like
        `generate`."""
        try:
            with self.decoder.generating(self._states):
                self._dummy()
            return self._states.bytes_of_slot
        finally:
            self._forget()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        params: SamplingParams,
        seeds: Sequence[int] | None = None,
        *,
        limits: Sequence[int] | None = None,
    ) -> list[Completion]:
        """See `Engine.generate`. `limits` replaces `params.max_new_tokens`, one number per prompt. Collective over the
        groups of the decoder: ranks without prompts call it too."""
        seeds = resolve_seeds(prompts, params, seeds)
        limits = [params.max_new_tokens] * len(prompts) if limits is None else limits
        slots = min(self.max_num_seqs, max(1, len(prompts)))
        # One more slot stores the cache of a prompt whose samples do not all fit.
        self._cache.max_num_seqs = self._states.max_num_seqs = slots + (len(prompts) > self.max_num_seqs)
        self._cache.longest = max((len(p) + n - 1 for p, n in zip(prompts, limits, strict=True)), default=1)
        self._cache.register()
        try:
            with self.decoder.generating(self._states):
                finished = self._finished(prompts, params, seeds, limits)
        finally:
            self._forget()
        if params.routing:
            finished = self._with_experts(finished)
        return [finished[i] for i in range(len(prompts))]

    def _finished(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[int], limits: Sequence[int]
    ) -> dict[int, Completion]:
        """Return completions by index. If CUDA graphs fail, generate again without them and with the gathered weights,
        because other ranks would not gather again."""
        if self._capture is not None and not params.routing:
            self._graphs = DecodeGraphs(
                self._capture,
                partial(self._logits, params),
                self._cache.reserve,
                params,
                largest=(min(self.max_num_seqs, len(prompts)), self._cache.longest or 1),
                device=self.decoder.device,
            )
        try:
            return self._draw_all(prompts, params, seeds, limits)
        except GraphsFailed as failure:
            warn("kernel_unavailable", "the sampler continues without CUDA graphs: %s", failure)
        self._capture = None
        self._forget()
        return self._draw_all(prompts, params, seeds, limits)

    def _draw_all(
        self, prompts: Sequence[Sequence[int]], params: SamplingParams, seeds: Sequence[int], limits: Sequence[int]
    ) -> dict[int, Completion]:
        random_numbers = streams(seeds, [0 if params.greedy else limit for limit in limits])
        waiting = deque(
            ActiveSample(i, *of_one) for i, of_one in enumerate(zip(prompts, limits, random_numbers, strict=True))
        )
        active: list[ActiveSample] = []
        finished: dict[int, Completion] = {}
        must_gather = self.decoder.gathers
        # Ranks with expert parallelism run the same number of forwards. A rank without sequences runs a dummy.
        while self.decoder.anyone(bool(waiting or active)) or must_gather:
            must_gather = False
            # Prefill several prompts together once enough slots are free, because each prefill delays all active
            # sequences. Example: max_num_seqs 32 and refill_threshold 0.125 wait until 4 slots are free.
            refills = bool(waiting) and (not active or self.max_num_seqs - len(active) >= self._refill)
            while refills and self._start_shared(waiting, active, params):
                self._retire(active, finished)
            if refills and waiting and len(active) < self.max_num_seqs:
                self._start(waiting, active, params)
            elif active:
                self._continue(active, params)
            else:
                self._dummy()
            self._retire(active, finished)
        return finished

    def _with_experts(self, finished: dict[int, Completion]) -> dict[int, Completion]:
        """Return the completions with routed experts of all layers. Collective over the pipeline."""
        local = {index: c.routed_experts for index, c in finished.items() if c.routed_experts is not None}
        all_layers = self.decoder.over_stages(self._layers, local)
        return {index: replace(c, routed_experts=all_layers[index]) for index, c in finished.items()}

    def _start_shared(self, waiting: deque[ActiveSample], active: list[ActiveSample], params: SamplingParams) -> bool:
        """Sample the first tokens of a prompt that has already run, into free slots. Return False if there are none."""
        shared = self._shared
        new = [] if shared is None else shared.next_samples(waiting, self.max_num_seqs - len(active))
        if shared is None or not new:
            return False
        # Active sequences use the slots 0 to B - 1, so new ones take the next slots.
        for slot in range(len(active), len(active) + len(new)):
            self._cache.move(self.max_num_seqs, slot, len(shared.prompt))
            self._states.move(self.max_num_seqs, slot)
        active += new
        logits_1V = shared.logits_1V
        self._draw(None if logits_1V is None else logits_1V.expand(len(new), -1), new, params)
        return True

    def _start(self, waiting: deque[ActiveSample], active: list[ActiveSample], params: SamplingParams) -> None:
        """Prefill the next prompts into free slots and sample their first tokens."""
        new = next_prefill(waiting, self.max_num_seqs - len(active), self.max_num_batched_tokens)
        # Samples of one prompt are adjacent. The prompt runs once, and its keys are copied to the slots of all its
        # samples.
        slots = range(len(active), len(active) + len(new))
        groups = [list(group) for _, group in groupby(zip(slots, new, strict=True), key=lambda pair: pair[1].prompt)]
        prompts = [group[0][1].prompt for group in groups]
        places = [[slot for slot, _ in group] for group in groups]
        goes_on = bool(waiting) and waiting[0].prompt == prompts[-1]
        if goes_on:
            places[-1].append(self.max_num_seqs)
        forward = Prefill([len(prompt) for prompt in prompts], places, self.decoder.device)
        input_ids_1T = self._tensor([token for prompt in prompts for token in prompt])[None]
        position_ids_1T = self._tensor([i for prompt in prompts for i in range(len(prompt))])[None]
        # The logits of a prompt's last token sample the first token of each of its samples.
        wanted_S = torch.cat([(end - 1).expand(len(g)) for end, g in zip(forward.cu_seqlens[1:], groups, strict=True)])
        active += new
        logits_SV = self._forward(forward, input_ids_1T, position_ids_1T, wanted_S.long(), new, params)
        last_1V = None if logits_SV is None else logits_SV[-1:].clone()
        self._shared = SharedPrompt(prompts[-1], last_1V, list(new[-1].experts)) if goes_on else None
        self._draw(logits_SV, new, params)

    def _continue(self, active: list[ActiveSample], params: SamplingParams) -> None:
        """One more token for every sequence."""
        cached = [sequence.cached for sequence in active]
        longest = max(cached) + 1
        if self._graphs is not None:
            rows = [(s.tokens[-1], s.cached, s.uniform) for s in active]
            drawn_2S = self._graphs.drawn(rows, longest)
            if drawn_2S is not None:
                self._take(drawn_2S, active)
                return
        forward = Decode(self._tensor(cached), longest)
        input_ids_B1 = self._tensor([s.tokens[-1] for s in active])[:, None]
        position_B1 = forward.position_B[:, None]
        logits_BV = self._forward(forward, input_ids_B1, position_B1, forward.slot_B, active, params)
        self._draw(logits_BV, active, params)

    def _logits(self, params: SamplingParams, inputs_B3: Tensor, longest: int) -> Tensor:
        """See `DecodeGraphs`."""
        token_B, position_B = inputs_B3[:, :2].long().unbind(1)
        forward = Decode(position_B, longest)
        logits_BV = self._forward(forward, token_B[:, None], position_B[:, None], forward.slot_B, [], params)
        assert logits_BV is not None, "one process holds the whole model"
        return logits_BV

    def _dummy(self) -> None:
        """A forward for the others' collectives: this rank has no sequence, so slot 0 is free."""
        zero_11 = self._tensor([0])[None]
        forward = Prefill([1], [[0]], self.decoder.device)
        self._forward(forward, zero_11, zero_11, zero_11[0], [], SamplingParams(temperature=0.0))

    def _forward(
        self,
        forward: Prefill | Decode,
        input_ids_BT: Tensor,
        position_ids_BT: Tensor,
        wanted_S: Tensor,
        sequences: Sequence[ActiveSample],
        params: SamplingParams,
    ) -> Tensor | None:
        """Return `logits_SV` on the sampling rank."""
        recorder = RouterRecorder() if params.routing else None
        with self._cache.during(forward), self._states.during(forward), choosing(recorder):
            logits_SV = self.decoder.logits(input_ids_BT, position_ids_BT, wanted_S)
        if recorder is not None and sequences:
            self._layers = tuple(sorted(recorder.layers))
            chosen_NLK = recorder.stacked(input_ids_BT.numel()).to(torch.int16).cpu().numpy()
            # not strict: the slot of a waiting prompt may follow the slots of sequences
            for sequence, rows in zip(sequences, forward.rows_of_slots(), strict=False):
                sequence.experts.append(chosen_NLK[rows])
        return logits_SV

    def _draw(self, logits_SV: Tensor | None, sequences: Sequence[ActiveSample], params: SamplingParams) -> None:
        """One token for each sequence, on every rank that decodes it."""
        drawn_2S = None
        if logits_SV is not None:
            uniform_S = torch.tensor([s.uniform for s in sequences], dtype=torch.float64, device=self.decoder.device)
            tokens_S, logprobs_S = sample_tokens(logits_SV, params, uniform_S)
            drawn_2S = torch.stack([tokens_S.double(), logprobs_S.double()])
        self._take(drawn_2S, sequences)

    def _take(self, drawn_2S: Tensor | None, sequences: Sequence[ActiveSample]) -> None:
        """Broadcast the sampled tokens to every rank."""
        tokens, logprobs = self.decoder.agree(drawn_2S, len(sequences)).tolist()
        for sequence, token, logprob in zip(sequences, tokens, logprobs, strict=True):
            sequence.tokens.append(int(token))
            sequence.logprobs.append(logprob)

    def _retire(self, active: list[ActiveSample], finished: dict[int, Completion]) -> None:
        """Remove finished sequences. The last sequence moves into a freed slot, so that the first B slots are
        in use."""
        # From the last slot: a sequence that moves into a freed slot was examined already.
        for slot in reversed(range(len(active))):
            sequence = active[slot]
            completion = sequence.completion(self.stop_token_ids, self.weight_version)
            if completion is None:
                continue
            finished[sequence.index] = completion
            # Example: slots A B C D and B finishes. D moves to slot 1, which gives A D C.
            last = active.pop()
            if last is not sequence:
                active[slot] = last
                self._cache.move(len(active), slot, last.cached)
                self._states.move(len(active), slot)

    def _forget(self) -> None:
        self._cache.clear()
        self._states.clear()
        self._shared = self._graphs = None

    def _tensor(self, values: Sequence[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.decoder.device)
