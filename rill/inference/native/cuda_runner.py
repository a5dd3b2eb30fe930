"""The CUDA runner: turns of steps are enqueued on one stream and read one turn late.

    host    build n+1 │ launch n+1 │ read n │ build n+2 │ …
    device  ───── turn n ─────►│───── turn n+1 ─────►│ …

Sampled tokens stay on the device in `last_tokens`, one per slot, where the next step picks them up; they are written to
the host's memory too. Block tables live on the device and receive only what changed.

A step of pure generation is replayed from a captured graph (decode_graphs.py), one with short prompts from two, the
prompts' (prompt_graphs.py) and that; other steps are launched kernel by kernel.

Axes: N token of the flat batch, B sequence, S sampled row, V vocabulary.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from rill.errors import EngineError
from rill.inference.collector import CollectorHold
from rill.inference.native.batch import StepBatch, changed_places
from rill.inference.native.decode_graphs import (
    ADAPTER_COLUMN,
    CHANGES_COLUMN,
    IDS_COLUMN,
    NUM_PROGRAMS,
    PLACE_COLUMN,
    POSITIONS_COLUMN,
    SLOTS_COLUMN,
    Array,
    DecodeGraphs,
    StepInputs,
    StepRing,
    Upload,
    sampling_columns,
)
from rill.inference.native.device_pool import DevicePool
from rill.inference.native.logit_edits import apply_edits
from rill.inference.native.model_runner import (
    CacheShape,
    LoadedModel,
    ModelRunner,
    PendingTurn,
    TurnResult,
    refusal,
)
from rill.inference.native.prompt_graphs import PromptGraphs
from rill.inference.native.sampler import SamplingBatch, likeliest, resample_masked
from rill.inference.native.triton_sampler import TritonSampler
from rill.models.decode import hopper
from rill.models.decode.attention_paged import PagedBatch
from rill.models.decode.decode_work import MAX_OWN_PIECES, WORDS, DecodeWork, work_in_runs
from rill.models.decode.low_rank import NO_ADAPTER, LowRankBank
from rill.models.decode.one_launch import MAX_ROWS as MAX_LAUNCH_ROWS
from rill.models.decode.one_launch import OneLaunch
from rill.models.decode.skinny import FEW_ROWS, MAX_ROWS, SkinnyStages, WideStages
from rill.models.ops import cuda_decode, triton_experts
from rill.models.ops.invariant import invariant_linear
from rill.models.ops.triton_decode import DecodeAttention
from rill.models.ops.triton_kernels import PREFILL_TILE, TritonKernels, take_inputs
from rill.models.ops.triton_logprob import token_logprobs
from rill.models.routing import UNKNOWN
from rill.models.vision import VisualRows

if TYPE_CHECKING:
    from rill.inference.native.engine import NativeEngine

logger = logging.getLogger(__name__)


class CudaRunner(ModelRunner):
    is_overlapped = True
    usual_num_slots = 512
    """A step of twice the sequences takes much less than twice the time, so a long tail of lengths ends sooner."""
    num_verified_rows = 64
    layer_bytes = 64 << 20
    round_bytes = 4 << 30

    def __init__(self, loaded: LoadedModel, config: NativeEngine.Config) -> None:
        super().__init__(loaded, config)
        device, calls = loaded.device, loaded.probe.calls
        batch_invariant, num_scheduler_steps = config.batch_invariant, config.num_scheduler_steps
        max_num_seqs, max_batched_tokens = self.max_num_seqs, config.max_batched_tokens
        triton_experts.use_for(self.model)
        kinds = {(call.num_heads, *layer) for call, layer in zip(calls, self.cache_shape.layers, strict=True)}
        if len(kinds) > 1:
            raise refusal(
                self.model,
                f"its layers differ in heads or their width ({sorted(kinds)}), which CUDA's kernels lack",
            )
        (num_heads, num_kv_heads, head_dim), = kinds  # fmt: skip
        decode = DecodeAttention(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            max_rows=max_num_seqs,
            device=device,
        )
        # What is batch_invariant has the bits of a trainer's scorer, whose attention is the one in Triton.
        decode.is_invariant = batch_invariant
        decode.uses_copies = not batch_invariant and self._finds_copies(
            num_heads, num_kv_heads, head_dim, config.block_size
        )
        self.use_kernels(TritonKernels(decode), fast_path=config.fast_path)
        self._skinny: SkinnyStages | None = None
        self._one_launch: OneLaunch | None = None
        self._wide: WideStages | None = None
        decoder, weight = self.decoder, self.head.weight
        # Its kernels join a product with what follows, and between ranks a sum comes in between.
        is_alone = self.shards is None and not batch_invariant
        if decoder is not None and is_alone and SkinnyStages.supports(decoder, weight):
            self._skinny = SkinnyStages(decoder, weight)
        self._bank: LowRankBank | None = None
        self._num_adapter_changes = 0
        self.uses_graphs = config.cuda_graphs
        self._sampler = TritonSampler(max_num_seqs, int(self.head.weight.shape[0]), device)
        # One row beyond the slots: padding of a graph's batch reads and writes there.
        self._num_columns = -(-loaded.max_len // config.block_size)
        self._tables = torch.zeros(max_num_seqs + 1, self._num_columns, dtype=torch.int32, device=device)
        self._last_tokens = torch.zeros(max_num_seqs + 1, dtype=torch.int32, device=device)
        # Tokens and the bits of their log-probabilities: nobody's, and those of the steps of three turns.
        places = (1 + 3 * num_scheduler_steps, 2, max_num_seqs)
        self._numbers = torch.empty(places, dtype=torch.int32, pin_memory=True)
        self._edited = torch.empty(1, *places[1:], dtype=torch.int32, device=device)
        self._zero = torch.zeros(1, dtype=torch.int32, device=device)
        self._num_steps, self._turn = num_scheduler_steps, 0
        self._collector = CollectorHold()
        words = 9 * (max_batched_tokens + max_num_seqs) + 2 * max_num_seqs * self._num_columns + 1024
        words += (max_batched_tokens if batch_invariant else max_num_seqs) * MAX_OWN_PIECES * WORDS
        # A step of pure generation uploads at most twice, one with prompts six times, and two turns are under way.
        num_usual = max(DecodeGraphs.num_shared_words(max_num_seqs), PromptGraphs.num_words())
        self._upload = Upload(words, num_usual, device, 2 * (2 * num_scheduler_steps + 4))
        self._offload = WeightOffload(device)
        self._cache_pool = DevicePool(device)
        self._cached: tuple[int, CacheShape] | None = None
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._graphs = DecodeGraphs(
            max_num_seqs, self._tables, self._upload, self._step, self._stream,
            num_staging=3 * num_scheduler_steps + 1, num_entries=max(1, NUM_PROGRAMS // num_kv_heads),
            is_invariant=batch_invariant,
            shares_prefixes=not batch_invariant and all(call.rule.window == 0 for call in calls),
            num_new=1 + config.num_speculative_tokens,
        )  # fmt: skip
        is_dense = decoder is not None and decoder.structure.is_dense
        self._prompts = PromptGraphs(
            max_batched_tokens if is_alone and is_dense else 0,
            self._tables, self._upload, self._hidden_of, self._stream,
        )  # fmt: skip
        torch.cuda.synchronize(device)

    # --- life --------------------------------------------------------------------------------------------

    def free_bytes(self) -> int:
        torch.cuda.empty_cache()
        return int(torch.cuda.mem_get_info(self.device)[0])

    def enter_thread(self) -> None:
        super().enter_thread()
        torch.cuda.set_device(self.device)
        torch.cuda.synchronize(self.device)
        torch.cuda.set_stream(self._stream)

    def active(self) -> AbstractContextManager[Any]:
        context: AbstractContextManager[Any] = torch.cuda.stream(self._stream)
        return context

    @torch.inference_mode()
    def prepare(self, max_rows: int | None = None) -> None:
        """Graphs are captured before the first request."""
        if self.uses_graphs:
            self._one_launch, self._wide = self._find_one_launch(), self._find_wide()
            try:
                self._graphs.capture_all(max_rows or self.max_num_seqs)
                self._prompts.capture_all()
            except RuntimeError as error:
                if self.decoder is not None and self.decoder.structure.is_dense:
                    raise
                # A model's own modules (float32 experts, too) may look at numbers on the host, which a capture forbids.
                logger.warning("no captured decode steps for %s: %s", self.model.config.model_type, error)
                self._drop_graphs()
                self.uses_graphs = False
        self._collector.take()

    def _find_one_launch(self) -> OneLaunch | None:
        if self._skinny is None or self.decoder is None or self.cache[0].keys.dtype != torch.bfloat16:
            return None
        try:
            one = OneLaunch.of(self.decoder, self.cache_shape.block_size, self.device)
            if one is not None:
                one.check(self._tables, self.cache)
            return one
        except EngineError as error:
            logger.warning("steps of few rows are launched kernel by kernel, which is slower: %s", error)
            return None

    def _finds_copies(self, num_heads: int, num_kv_heads: int, head_dim: int, block_size: int) -> bool:
        if not cuda_decode.attends(num_heads, num_kv_heads, head_dim, block_size, self.device):
            return False
        try:
            cuda_decode.check(num_heads, num_kv_heads, head_dim, block_size, self.device)
            return True
        except EngineError as error:
            logger.warning(
                "attention of generated tokens has the kernel in Triton, which is slower: %s", error
            )
            return False

    def _find_wide(self) -> WideStages | None:
        if self._skinny is None or self.decoder is None or self.max_num_seqs <= FEW_ROWS:
            return None
        if not WideStages.supports(self.decoder, self.device):
            return None
        wide = WideStages(self.decoder)
        try:
            wide.check()
            return wide
        except EngineError as error:
            logger.warning("steps of many rows have the library's products, which are slower: %s", error)
            return None

    def leave_thread(self) -> None:
        self._collector.give_back()

    def allocate_cache(self, num_blocks: int) -> None:
        """After a release, at the addresses of before, which the graphs know."""
        if self._cached == (num_blocks, self.cache_shape):
            self._cache_pool.take_back()
            for keys, values in self.cache:
                keys.zero_()
                values.zero_()
            if self._experts_SLK is not None:
                self._experts_SLK.fill_(UNKNOWN)
        else:
            self._drop_graphs()
            self.cache, self._cache_pool = [], DevicePool(self.device)
            with self._cache_pool.use():
                super().allocate_cache(num_blocks)
            self._cached = (num_blocks, self.cache_shape)
        torch.cuda.synchronize(self.device)

    def free_cache(self) -> None:
        torch.cuda.synchronize(self.device)
        if not self._loaded.is_owned:
            self._drop_graphs()  # they hold the addresses of weights that somebody else may move next
        self._cache_pool.give_back()
        if self.vision is not None:
            self.vision.forget()
        torch.cuda.empty_cache()

    def free_graphs(self) -> None:
        self._drop_graphs()
        torch.cuda.empty_cache()

    def _drop_graphs(self) -> None:
        self._graphs.drop()
        self._prompts.drop()

    def offload_weights(self) -> None:
        """A trainer that shares its parameters looks after their memory itself."""
        if self._loaded.is_owned:
            if self._offload.pool is None:
                self._drop_graphs()
            self._offload.offload(p.data for p in self.model.parameters())

    def reload_weights(self) -> None:
        self._offload.reload()

    def fence(self) -> Callable[[], None]:
        return partial(self._stream.wait_event, torch.cuda.current_stream(self.device).record_event())

    def finish_update(self) -> None:
        super().finish_update()
        # The sender may reuse or unmap its tensors as soon as the update returns.
        self._stream.synchronize()

    # --- a step ------------------------------------------------------------------------------------------

    @torch.inference_mode()
    def launch(self, steps: list[StepBatch]) -> PendingTurn:
        scores: list[torch.Tensor] = []
        top = None
        self._turn = (self._turn + 1) % 3
        first = 1 + self._turn * self._num_steps
        for place, batch in enumerate(steps, first):
            is_fast, numbers_N = self._adapter_numbers(batch)
            columns: list[torch.Tensor] | None = None
            if self.uses_graphs and batch.is_decode_only and is_fast:
                logits_SV = self._replay(batch, numbers_N, place)
                if batch.sampling.edits:
                    columns = self._graphs.sampling_columns(batch.num_seqs)
            elif self.uses_graphs and (size := self._prompts.size_of(batch)):
                logits_SV, columns, scores = self._replay_prompts(batch, size)
            else:
                logits_SV, columns, scores = self._eager(batch, is_fast, numbers_N)
            if num_rows := len(batch.sampled):
                if batch.sampling.num_top:
                    top = likeliest(logits_SV[:num_rows], batch.sampling)
                if columns is not None:
                    self._sample(logits_SV[:num_rows], columns, batch.sampling, self._numbers[place])
        done = self._stream.record_event()

        def read() -> TurnResult:
            done.synchronize()
            # Copies: the buffer is written again while these are read.
            numbers = self._numbers[first : first + len(steps)].numpy()[:, :, : len(steps[0].sampled)]
            tokens_KS, logprobs_KS = numbers[:, 0].copy(), numbers[:, 1].copy().view(np.float32)
            likely = None if top is None else (top[0].cpu().numpy(), top[1].cpu().numpy())
            return TurnResult(tokens_KS, logprobs_KS, [s.cpu().numpy() for s in scores], likely)

        return read

    @torch.inference_mode()
    def follow(self, steps: list[StepBatch]) -> None:
        """The same graphs as rank 0's, whose collectives meet; their logits are not looked at."""
        for batch in steps:
            if self.uses_graphs and batch.is_decode_only:
                self._replay(batch, None, place=0)
            else:
                self.forward(batch)

    def forward(self, batch: StepBatch) -> torch.Tensor:
        paged, ids, positions, *_ = self._upload_batch(batch)
        return self._hidden(ids, positions, paged, None, self.visual_rows(batch))

    def use_modules(self) -> None:
        super().use_modules()
        self._skinny = self._one_launch = self._wide = None

    def _adapter_numbers(self, batch: StepBatch) -> tuple[bool, Array | None]:
        """Whether a graph may compute this batch, and each row's adapter, where any has one."""
        if not batch.adapters:
            return True, None
        if self.decoder is None:
            return False, None
        if self._num_adapter_changes != self.adapters.num_changes:
            self._num_adapter_changes = self.adapters.num_changes
            self._bank = self.adapters.arranged(self.decoder.layers)
            self._graphs.drop_adapted()
        assert self._bank is not None
        numbers_N = np.full(batch.num_tokens, NO_ADAPTER, dtype=np.int32)
        for name, rows in batch.adapters.items():
            numbers_N[rows] = self._bank.number(name)
        return self._bank.covers_all, numbers_N

    def _replay(self, batch: StepBatch, numbers_N: Array | None, place: int) -> torch.Tensor:
        places, values = self._table_changes(batch)
        if len(places) > batch.num_seqs:
            self._push_tables(batch)
            places = values = places[:0]
        return self._graphs.replay(batch, numbers_N, place, (places, values))

    def _step(
        self, ring: StepRing, inputs: StepInputs, paged: PagedBatch, has_adapters: bool
    ) -> torch.Tensor:
        """What a graph captures."""
        take_inputs(
            ring.words, ring.turn, self._last_tokens, self._tables, inputs.words, inputs.size, inputs.stride,
            slots=SLOTS_COLUMN, places=CHANGES_COLUMN, values=CHANGES_COLUMN + 1,
        )  # fmt: skip
        ids_N, positions_N = inputs.column(IDS_COLUMN), inputs.column(POSITIONS_COLUMN)
        adapters_N = inputs.column(ADAPTER_COLUMN) if has_adapters else None
        logits_SV = self._logits_of(ids_N, positions_N, paged, adapters_N)
        self._sampler(
            logits_SV, inputs.sampling(), self._last_tokens, self._numbers, inputs.column(PLACE_COLUMN),
            (ring.turn, len(ring.words)),
        )  # fmt: skip
        return logits_SV

    def _logits_of(
        self,
        ids_N: torch.Tensor,
        positions_N: torch.Tensor,
        paged: PagedBatch,
        adapters_N: torch.Tensor | None,
    ) -> torch.Tensor:
        """Of a step of pure generation."""
        skinny, wide = self._skinny, self._wide
        if skinny is not None and adapters_N is None and len(ids_N) <= (FEW_ROWS if wide else MAX_ROWS):
            assert self.decoder is not None and paged.decode_work is not None
            one = self._one_launch
            if one is not None and len(ids_N) <= MAX_LAUNCH_ROWS and paged.decode_work.shared is None:
                hidden_NE = one(ids_N, positions_N, paged, self.cache)
            else:
                hidden_NE = self.decoder(ids_N, positions_N, paged, self.cache, stages=skinny)
            return self.logit_rule(skinny.logits(hidden_NE))
        if wide is not None and adapters_N is None and len(ids_N) <= hopper.MAX_GATED_ROWS:
            assert self.decoder is not None
            return self.logits(self.decoder(ids_N, positions_N, paged, self.cache, stages=wide))
        return self.logits(self._hidden(ids_N, positions_N, paged, adapters_N))

    def _hidden_of(self, ids_N: torch.Tensor, positions_N: torch.Tensor, paged: PagedBatch) -> torch.Tensor:
        """What a graph of prompts captures."""
        return self._hidden(ids_N, positions_N, paged, None)

    def _hidden(
        self,
        ids_N: torch.Tensor,
        positions_N: torch.Tensor,
        paged: PagedBatch,
        adapters_N: torch.Tensor | None,
        visual: VisualRows | None = None,
    ) -> torch.Tensor:
        """Through the decoder, or without one through the modules."""
        if self.decoder is None:
            hidden_NE = self.run_modules(paged, ids_N, positions_N, visual)
        else:
            rows = None
            if adapters_N is not None:
                assert self._bank is not None
                rows = self._bank.rows(adapters_N)
            hidden_NE = self.decoder(ids_N, positions_N, paged, self.cache, adapters=rows, visual=visual)
        self.keep_experts(paged.slots_N)
        return hidden_NE

    def _replay_prompts(
        self, batch: StepBatch, size: int
    ) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        """As _eager, in two graphs; what the second samples by itself is sampled again with the rest."""
        self._push_tables(batch)
        count = batch.num_running
        hidden_NE = self._prompts.replay(batch, size)
        rows = (batch.sampled_rows_S[count:] - count).astype(np.int32)
        rows_S, *columns = self._upload([rows, batch.sampled_slots_S, *sampling_columns(batch.sampling)])
        parts = [self.logits(hidden_NE[rows_S])] if len(rows) else []
        if count:
            nothing = np.zeros(0, dtype=np.int32)
            parts.insert(0, self._graphs.replay(batch.running(), None, 0, (nothing, nothing))[:count])
        logits_SV = torch.cat(parts) if parts else hidden_NE[:0]
        return (
            logits_SV,
            columns,
            [self.score(hidden_NE[row - count :], chunk) for chunk, row in batch.scored],
        )

    def _eager(
        self, batch: StepBatch, is_fast: bool, numbers_N: Array | None
    ) -> tuple[torch.Tensor, list[torch.Tensor], list[torch.Tensor]]:
        paged, ids, positions, rows_S, columns = self._upload_batch(batch)
        visual = self.visual_rows(batch)
        if is_fast:
            adapters_N = None if numbers_N is None else self._upload([numbers_N])[0]
            hidden_NE = self._hidden(ids, positions, paged, adapters_N, visual)
        else:
            with self.adapters.active(batch.adapters, self.device):
                hidden_NE = self.run_modules(paged, ids, positions, visual)
            self.keep_experts(paged.slots_N)
        logits_SV = self.logits(hidden_NE[rows_S]) if batch.sampled else hidden_NE[:0]
        return logits_SV, columns, [self.score(hidden_NE[row:], chunk) for chunk, row in batch.scored]

    def _upload_batch(
        self, batch: StepBatch
    ) -> tuple[PagedBatch, torch.Tensor, torch.Tensor, torch.Tensor, list[torch.Tensor]]:
        lens, slots, num_decodes = batch.context_lens_B, batch.slots_B, batch.num_decodes
        if self.batch_invariant:
            # One kernel for all: a prompt's token attends like a generated one, or its bits would tell which it was.
            firsts, per_seq = batch.query_starts_B1[:-1], np.diff(batch.query_starts_B1)
            before = np.repeat(lens - per_seq - firsts, per_seq)
            lens = (before + np.arange(batch.num_tokens) + 1).astype(np.int32)
            slots = np.repeat(slots, per_seq)
            num_decodes = batch.num_tokens
        counts = np.diff(batch.query_starts_B1).tolist()
        tiles = [
            (row, offset)
            for row in range(num_decodes, batch.num_seqs)
            for offset in range(0, counts[row], PREFILL_TILE)
        ]
        flat_tiles = np.array(tiles, dtype=np.int32).reshape(-1)
        work, pieces, runs = work_in_runs(lens[:num_decodes], slots[:num_decodes], self.max_num_seqs)
        arrays = [
            batch.token_ids_N.astype(np.int32),
            batch.positions_N.astype(np.int32),
            batch.kv_slots_N.astype(np.int32),
            batch.query_starts_B1,
            lens,
            slots,
            flat_tiles,
            work.reshape(-1),
            pieces,
            batch.sampled_rows_S.astype(np.int32),
            batch.sampled_slots_S,
            *sampling_columns(batch.sampling),
        ]
        (
            ids, positions, kv_slots, starts, lens_on, slots_on, tile_words, work_on, pieces_on, rows_S, *columns
        ) = self._upload(arrays)  # fmt: skip
        self._push_tables(batch)
        count = batch.num_decodes
        if count:
            ids[:count] = torch.where(ids[:count] < 0, self._last_tokens[slots_on[:count]], ids[:count])
        paged = PagedBatch(
            slots_N=kv_slots,
            query_starts_B1=starts,
            context_lens_B=lens_on,
            block_tables_BM=self._tables,
            num_decodes=num_decodes,
            table_rows_B=slots_on,
            decode_work=DecodeWork(work_on, runs, pieces_on) if num_decodes else None,
            prefill_tiles=tile_words.view(-1, 2) if tiles else None,
        )
        return paged, ids, positions, rows_S, columns

    def _push_tables(self, batch: StepBatch) -> None:
        if batch.table_updates:
            at, new = self._upload([*self._table_changes(batch)])
            self._tables.view(-1).index_copy_(0, at.long(), new)

    def _table_changes(self, batch: StepBatch) -> tuple[Array, Array]:
        """Where in the tables, and to what."""
        slots, columns = changed_places(batch.table_updates)
        return slots * self._num_columns + columns, batch.tables[slots, columns]

    def logits(self, hidden_SE: torch.Tensor) -> torch.Tensor:
        """In the model's dtype: the sampler's kernels read that, and half of fp32's bytes."""
        if self.batch_invariant:
            logits_SV = invariant_linear(hidden_SE, self.head.weight)
        else:
            logits_SV = self.head(hidden_SE)
        return self.logit_rule(logits_SV)

    def _sample(
        self,
        logits_SV: torch.Tensor,
        columns: list[torch.Tensor],
        sampling: SamplingBatch,
        numbers: torch.Tensor,
    ) -> None:
        """Into `numbers`, [2, rows] in the host's memory, and the newest token of each slot. For steps that are no
        graph, and where logits are edited."""
        if sampling.edits:
            logits_SV = logits_SV.float()
            apply_edits(logits_SV, sampling.edits)
        self._sampler(logits_SV, columns, self._last_tokens, self._edited, self._zero)
        rows, sampled = len(logits_SV), self._edited[0]
        masked = resample_masked(
            logits_SV, sampling, sampled[0, :rows], sampled[1, :rows].view(torch.float32)
        )
        if masked is not None:
            self._last_tokens[columns[0][masked].long()] = sampled[0, masked]
        numbers.copy_(sampled, non_blocking=True)

    def token_logprobs(
        self, hidden_SE: torch.Tensor, targets_S: torch.Tensor, temperature: float
    ) -> torch.Tensor:
        inverse_S = 1.0 / torch.full((len(targets_S),), temperature, device=self.device)
        return token_logprobs(self.logits(hidden_SE), targets_S, inverse_S)


class WeightOffload:
    """Weights out of a device's memory and back, with every tensor and view over them still valid afterwards: holds
    pinned copies of parameters whose memory has been given back. From the first time on they keep their addresses."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held: list[tuple[torch.UntypedStorage, torch.Tensor]] = []
        self.pool: DevicePool | None = None

    def offload(self, parameters: Iterable[torch.Tensor]) -> None:
        seen: set[int] = set()
        for tensor in parameters:
            storage = tensor.untyped_storage()
            if storage.data_ptr() in seen:
                continue  # tied, or parts of one joined projection
            seen.add(storage.data_ptr())
            host = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=True)
            host.copy_(_bytes_of(storage, self._device), non_blocking=True)
            self._held.append((storage, host))
        torch.cuda.synchronize(self._device)
        if self.pool is not None:
            self.pool.give_back()
            return
        for storage, _ in self._held:
            storage.resize_(0)
        torch.cuda.empty_cache()

    def reload(self) -> None:
        """May be called again where there was no room for all of them."""
        self.pool = self.pool or DevicePool(self._device)
        self.pool.take_back()
        with self.pool.use():
            for storage, host in self._held:
                if storage.nbytes() == 0:  # not in the pool yet
                    storage.resize_(host.numel())
        for storage, host in self._held:
            _bytes_of(storage, self._device).copy_(host, non_blocking=True)
        torch.cuda.synchronize(self._device)
        self._held.clear()


def _bytes_of(storage: torch.UntypedStorage, device: torch.device) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)
