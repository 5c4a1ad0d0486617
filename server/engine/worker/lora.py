"""Adapters on a CPU: one product per adapter over the rows that use it.

vLLM's own CPU path gathers the A and B of every token, reads the index -1 of a request without an adapter
as the last slot (so such a request is answered with somebody's adapter once all slots are full), and walks
the slices of a fused layer one by one. Here:

* which rows belong to which adapter is worked out once a step, when the batch changes, not once a layer;
* the slices of a layer (q, k, v) lie in one tensor a slot, A side by side and B on a block diagonal, so a
  layer costs two products an adapter however many slices it has;
* rows without an adapter are in no group, so nothing is added to them.

Shapes: N tokens, I inputs, O outputs of all slices, S slots, R rank times slices.

Invariant: the tensors that vLLM fills (`lora_a_stacked`, `lora_b_stacked`) stay the only copy; the fused
tensors are their storage.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

MASKED_ROWS = 64
"""Batches up to this many rows are multiplied whole where an adapter's rows are scattered, with the others
set to zero in between: at these sizes a product costs its weights and its call, not its rows."""


@dataclass(frozen=True, slots=True)
class Group:
    """The rows of one batch that use one adapter, in the form that is cheapest to compute with."""

    slot: int
    rows: slice | torch.Tensor
    """A contiguous run, or the indices of scattered rows."""
    mask: torch.Tensor | None = None
    """[N, 1], one where the row is in `rows`: set for scattered rows of a small batch."""


@dataclass(frozen=True, slots=True)
class Fused:
    """All slices of one layer. a_SIR and b_SRO are laid out for `x @ a @ b` without a transpose."""

    a_SIR: torch.Tensor
    b_SRO: torch.Tensor
    owner: tuple[torch.Tensor, ...]
    """The tuple that vLLM passes; held so that its id stays its own."""


class GroupedAdapters(PunicaWrapperCPU):  # type: ignore[misc]
    """Drop-in for vLLM's CPU wrapper, chosen by `extension.install`."""

    def __init__(self, max_num_batched_tokens: int, max_batches: int, device: Any, **kwargs: Any) -> None:
        super().__init__(max_num_batched_tokens, max_batches, device, **kwargs)
        self._token_groups: list[Group] = []
        self._sampled_groups: list[Group] = []
        self._layers: dict[int, Fused] = {}

    def update_metadata(
        self, mapping: Any, lora_index_to_id: list[int | None], max_loras: int, vocab_size: int, **kwargs: Any
    ) -> None:
        """Called by vLLM when the rows of the batch, or the adapters in the slots, have changed."""
        self._update_base_metadata(mapping, lora_index_to_id, max_loras, vocab_size)
        slots = {adapter: slot for slot, adapter in enumerate(lora_index_to_id) if adapter is not None}
        self._token_groups = group_rows(mapping.index_mapping, slots)
        self._sampled_groups = group_rows(mapping.prompt_mapping, slots)
        self.is_prefill = mapping.is_prefill

    def add_lora_linear(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: tuple[torch.Tensor, ...],
        lora_b_stacked: tuple[torch.Tensor, ...],
        scale: float,
        output_slices: tuple[int, ...],
        **kwargs: Any,
    ) -> None:
        """``y += x @ A @ B`` for the rows of each adapter; y [N, O] in place, x [N, I].

        vLLM has multiplied an adapter's own scale into its B, and passes a `scale` of 1.
        """
        assert scale == 1.0
        if not self._token_groups:
            return
        fused = self._layers.get(id(lora_a_stacked))
        if fused is None:
            fused = fuse(lora_a_stacked, lora_b_stacked)
            self._layers[id(lora_a_stacked)] = fused
        for group in self._token_groups:
            _add_product(y, x, fused.a_SIR[group.slot], fused.b_SRO[group.slot], group)

    def add_lora_logits(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_a_stacked: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        scale: float,
        **kwargs: Any,
    ) -> None:
        """The same for the head, whose rows are the sampled positions."""
        assert scale == 1.0
        y, x = y.view(-1, y.shape[-1]), x.view(-1, x.shape[-1])
        for group in self._sampled_groups:
            a, b = lora_a_stacked[group.slot, 0], lora_b_stacked[group.slot, 0]
            _add_product(y, x, a.t(), b.t(), group)

    def add_lora_embedding(
        self,
        y: torch.Tensor,
        x: torch.Tensor,
        lora_b_stacked: torch.Tensor,
        add_inputs: bool = True,
        **kwargs: Any,
    ) -> None:
        """``y += x @ B``: an embedding's A was already looked up. x [N, R], y [N, O] in place."""
        for group in self._token_groups:
            y[group.rows] += (x[group.rows] @ lora_b_stacked[group.slot, 0].t()).to(y.dtype)

    def add_shrink(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("fully sharded adapters are not supported on a CPU")

    def add_expand(self, *args: Any, **kwargs: Any) -> None:
        raise NotImplementedError("fully sharded adapters are not supported on a CPU")


def group_rows(adapter_of_row: tuple[int, ...], slots: dict[int, int]) -> list[Group]:
    """Rows by slot, in ascending order of slot. Ids that are not positive mean no adapter.

    >>> group_rows((7, 7, 0, 9), {7: 1, 9: 0})[1].rows
    slice(0, 2, None)
    """
    ids = np.asarray(adapter_of_row, dtype=np.int64)
    groups = []
    for adapter in np.unique(ids[ids > 0]).tolist():
        own = ids == adapter
        rows = np.flatnonzero(own)
        first, last = int(rows[0]), int(rows[-1])
        if last - first + 1 == len(rows):
            groups.append(Group(slots[adapter], slice(first, last + 1)))
            continue
        small = len(ids) <= MASKED_ROWS
        mask = torch.from_numpy(own[:, None].astype(np.float32)) if small else None
        groups.append(Group(slots[adapter], torch.from_numpy(rows), mask))
    return sorted(groups, key=lambda group: group.slot)


@torch.inference_mode(False)
def fuse(lora_a_stacked: tuple[torch.Tensor, ...], lora_b_stacked: tuple[torch.Tensor, ...]) -> Fused:
    """Move the slices of one layer into one tensor for A and one for B; vLLM's tensors become views of them.

    Slice i of A is [S, 1, rank, I], of B [S, 1, O_i, rank]; what they hold is kept. Called inside a step,
    where new tensors would belong to inference mode and the next load, outside it, could not write to them.
    """
    slots, _, rank, inputs = lora_a_stacked[0].shape
    sizes = [b.shape[2] for b in lora_b_stacked]
    a_SIR = lora_a_stacked[0].new_zeros(slots, inputs, rank * len(sizes))
    b_SRO = lora_b_stacked[0].new_zeros(slots, rank * len(sizes), sum(sizes))
    offset = 0
    for i, (a, b) in enumerate(zip(lora_a_stacked, lora_b_stacked, strict=True)):
        ranks, outputs = slice(i * rank, (i + 1) * rank), slice(offset, offset + sizes[i])
        offset += sizes[i]
        for stacked, view in ((a, a_SIR[:, :, ranks]), (b, b_SRO[:, ranks, outputs])):
            shared = view.transpose(1, 2).unsqueeze(1)
            shared.copy_(stacked)
            stacked.data = shared
    return Fused(a_SIR, b_SRO, lora_a_stacked)


def _add_product(y: torch.Tensor, x: torch.Tensor, a: torch.Tensor, b: torch.Tensor, group: Group) -> None:
    """``y[rows] += x[rows] @ a @ b`` in place; y [N, O], x [N, I], a [I, R], b [R, O]."""
    x = x.to(a.dtype)
    if group.mask is not None:
        _add_mm(y, torch.mm(x, a).mul_(group.mask), b)
    elif isinstance(group.rows, slice):
        _add_mm(y[group.rows], torch.mm(x[group.rows], a), b)
    else:
        inner = torch.mm(x.index_select(0, group.rows), a)
        y.index_add_(0, group.rows, torch.mm(inner, b).to(y.dtype))


def _add_mm(y: torch.Tensor, inner: torch.Tensor, b: torch.Tensor) -> None:
    if y.dtype == b.dtype:
        y.addmm_(inner, b)
    else:
        y += torch.mm(inner, b)
