"""Double Sparsity: tokens are scored by the few channels that decide the products."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.kv.selectors._budget import BudgetSelector, check_scale, split_heads
from penstock.kv.selectors._packing import best_weights, pack


class ChannelCalibration:
    """Sums of abs(q k) per channel, over the pairs of a query and an earlier key of some texts.

    Example:
        >>> calibration = ChannelCalibration()
        >>> keys = torch.randn(1, 2, 100, 16)
        >>> calibration.note(0, torch.randn(1, 8, 100, 16), keys)
        >>> calibration.channels(4)[0].shape
        torch.Size([2, 4])

    Source:
        Yang et al., "Post-training sparse attention with double sparsity", arXiv:2408.07092,
        section 3.1 (offline calibration).
    """

    def __init__(self) -> None:
        self._sums: dict[int, Tensor] = {}  # float64 (H, d) by layer

    def note(self, layer: int, query: Tensor, keys: Tensor) -> None:
        """Add the pairs of a text without a cache.

        Args:
            layer: Index of the layer.
            query: `(B, Hq, n, d)`, rotated.
            keys: `(B, H, n, d)`, rotated; of the same tokens.
        """
        if query.shape[2] != keys.shape[2]:
            raise ValueError(
                f"query and keys must be of the same tokens; got {query.shape[2]} and "
                f"{keys.shape[2]}: calibrate without a cache"
            )
        batch, num_heads, num_tokens, dim = keys.shape
        rows = split_heads(query, num_heads).reshape(batch, num_heads, -1, num_tokens, dim)
        # Sum over i <= j of |q_j| |k_i|, without the pairs themselves.
        earlier = keys.abs().double().cumsum(dim=2)
        sums = (rows.abs().sum(dim=2).double() * earlier).sum(dim=(0, 2))
        self._sums[layer] = self._sums.get(layer, torch.zeros_like(sums)) + sums

    def channels(self, num_channels: int) -> list[Tensor]:
        """Return the channels with the largest sums, per layer int64 `(H, num_channels)`."""
        if sorted(self._sums) != list(range(len(self._sums))) or not self._sums:
            raise ValueError(
                f"every layer from 0 on must be calibrated; got layers {sorted(self._sums)}"
            )
        dim = self._sums[0].shape[-1]
        if not 0 < num_channels <= dim:
            raise ValueError(f"num_channels must be 1 to {dim}; got {num_channels}")
        return [
            self._sums[layer].topk(num_channels).indices.sort(dim=-1).values
            for layer in range(len(self._sums))
        ]


class DoubleSparsity(BudgetSelector):
    """Blocks of the tokens whose label channels fit the query best.

    The label of a token is its key at the r channels of the calibration. Labels stay on the device;
    a block scores as its best token: with l the labels and g a query of the group,

        weight(g, t) = softmax over t of (q_g[channels] . l_t * scale)
        score(block) = sum or max over g of (max over t in block of weight(g, t))

    Example:
        >>> calibration = ChannelCalibration()
        >>> calibration.note(0, torch.randn(1, 8, 100, 16), torch.randn(1, 2, 100, 16))
        >>> selector = DoubleSparsity(calibration.channels(4), share=1 / 16)

    Args:
        channels: Per layer, the channels of each KV head, int64 `(H, r)`; see `ChannelCalibration`.
        num_blocks: Full blocks to read; or give `share`.
        share: Of the full blocks.
        num_sinks: Blocks at the beginning that are always read.
        num_recent: Newest full blocks that are always read.
        reduce: "sum" or "max" over the queries of a KV head.
        bits: None keeps labels in the dtype of the keys; 4 keeps two channels in a byte, with a
            float16 step and offset per block and channel. r must then be even.
        scale: Of the attention's products; None is d ** -0.5.

    Source:
        Yang et al., arXiv:2408.07092, section 3.2 (channel and token sparsity), here by blocks and
        with one choice for the queries of a KV head.
    """

    def __init__(
        self,
        channels: Sequence[Tensor],
        *,
        num_blocks: int | None = None,
        share: float | None = None,
        num_sinks: int = 1,
        num_recent: int = 1,
        reduce: str = "sum",
        bits: int | None = None,
        scale: float | None = None,
    ) -> None:
        super().__init__(
            num_blocks=num_blocks, share=share, num_sinks=num_sinks, num_recent=num_recent
        )
        if reduce not in ("sum", "max"):
            raise ValueError(f'reduce must be "sum" or "max"; got {reduce!r}')
        if bits not in (None, 4):
            raise ValueError(f"bits must be None or 4; got {bits!r}")
        for layer, chosen in enumerate(channels):
            if chosen.dtype != torch.int64 or chosen.dim() != 2:
                raise ValueError(
                    f"channels[{layer}] must be int64 (H, r); got {chosen.dtype} "
                    f"{tuple(chosen.shape)}"
                )
            if not chosen.numel() or bool(chosen.min() < 0):
                raise ValueError(
                    f"channels[{layer}] must be numbers of channels from 0 on, at least one of "
                    f"each KV head; got {tuple(chosen.shape)}: {chosen.tolist()}"
                )
            if bits == 4 and chosen.shape[1] % 2:
                raise ValueError(f"with bits=4 r must be even; got {chosen.shape[1]} channels")
        check_scale(scale)
        self._channels = list(channels)
        self._reduce = reduce
        self._bits = bits
        self._scale = scale

    @property
    def nbytes(self) -> int:
        """Bytes of the labels on the device, with room for growth, and of the channel numbers."""
        return super().nbytes + sum(chosen.nbytes for chosen in self._channels)

    def observe(self, layer: int, first_block: int, keys: Tensor) -> None:
        """Keep the labels of new blocks; arguments as of `BudgetSelector.observe`."""
        super().observe(layer, first_block, keys)
        if layer >= len(self._channels):
            raise ValueError(f"layer {layer}: only {len(self._channels)} layers are calibrated")
        channels = self._channels[layer].to(keys.device)
        if channels.shape[0] != keys.shape[1]:
            raise ValueError(
                f"layer {layer}: channels are of {channels.shape[0]} KV heads, keys of "
                f"{keys.shape[1]}"
            )
        if bool(channels.max() >= keys.shape[4]):
            raise ValueError(
                f"layer {layer}: channel {int(channels.max())} is calibrated, of keys of "
                f"{keys.shape[4]} channels"
            )
        index = channels[None, :, None, None].expand(*keys.shape[:4], -1)
        labels = keys.gather(4, index)
        self._summaries.append(layer, first_block, pack(labels, self._bits))

    def _scores(self, query: Tensor, layer: int, total: int) -> Tensor:
        channels = self._channels[layer].to(query.device)
        rows = split_heads(query, channels.shape[0])
        index = channels[None, :, None].expand(rows.shape[0], -1, rows.shape[2], -1)
        scale = query.shape[-1] ** -0.5 if self._scale is None else self._scale
        weights = best_weights(rows.gather(3, index) * scale, self._summaries.read(layer, total))
        return weights.sum(dim=2) if self._reduce == "sum" else weights.amax(dim=2)
