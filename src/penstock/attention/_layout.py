"""Layouts: the blocks of queries and keys that see each other, and the tokens within them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Self

import torch
from torch import Tensor

from penstock.attention import _patterns
from penstock.attention._arguments import (
    as_numbers,
    check_integers,
    check_mask,
    check_scores,
    check_tokens,
    check_vector,
    parse_block,
)
from penstock.attention._csr import BlockLists, Ranges, list_blocks
from penstock.compat.autograd import outlive_inference
from penstock.units import parse_count


@dataclasses.dataclass(frozen=True, eq=False)
class Layout:
    """Blocks of an attention in which queries see keys, by query block and by key block.

    Within head h, query i sees key j where block `(i // block, j // block)` is listed and

        first_key[i] <= j < end_key[i]  and  i < end_query[j]

    A listed block that is not partial passes that test with all of its tokens, so kernels test the
    partial ones only. Tokens beyond the last query or key are no tokens, whatever a list says: a
    kernel stops at the lengths of its operands. Rows may be empty: their output is 0.

    All tensors lie on one device, are contiguous, and are made by the functions below.

    Attributes:
        block: Tokens of a block: 16, 32, 64 or 128.
        pattern: "dense" where every query sees every key, "causal" where query i sees keys up to i,
            both for any length; else "blocks".
        num_queries: Queries that a call must have; None for any number that needs all query blocks.
        num_keys: The same for keys.
        row_offsets: int32 `(heads, query_blocks + 1)`, heads 1 or the query heads: query block r of
            head h has the entries from `row_offsets[h, r]` to `row_offsets[h, r + 1]` of the next
            two. Offsets count on from head to head.
        key_blocks: int32 `(listed,)`: key blocks, ascending within a query block.
        is_partial: uint8 `(listed,)`: whether some of the block's tokens do not see each other.
        column_offsets: int32 `(heads, key_blocks + 1)`: the same by key block, for the next two.
        query_blocks: int32 `(listed,)`: query blocks, ascending within a key block.
        is_partial_of_column: uint8 `(listed,)`.
        first_key: int32 `(query_blocks * block,)`: the first key that a query may see.
        end_key: int32 `(query_blocks * block,)`: the end of the keys that a query may see.
        end_query: int32 `(key_blocks * block,)`: the end of the queries that may see a key.
    """

    block: int
    pattern: str
    num_queries: int | None
    num_keys: int | None
    row_offsets: Tensor
    key_blocks: Tensor
    is_partial: Tensor
    column_offsets: Tensor
    query_blocks: Tensor
    is_partial_of_column: Tensor
    first_key: Tensor
    end_key: Tensor
    end_query: Tensor

    @classmethod
    def from_blocks(
        cls,
        mask: Tensor,
        block: int = 64,
        *,
        causal: bool = False,
        num_queries: int | None = None,
        num_keys: int | None = None,
    ) -> Self:
        """Return the layout of a mask of blocks, of any origin.

        Example:
            >>> layout = Layout.from_blocks(torch.eye(4, dtype=torch.bool)[None], block=16)
            >>> layout.num_blocks, layout.density
            (4, 0.25)

        Args:
            mask: bool `(heads or 1, query_blocks, key_blocks)`, or without heads, on any device.
            block: Tokens of a block: 16, 32, 64 or 128.
            causal: Whether query i sees no key after i, within the blocks of the mask.
            num_queries: Queries that a call must have; None for any number that needs all blocks.
            num_keys: The same for keys.

        Raises:
            TypeError: `mask` is not bool.
            ValueError: A shape, a number of tokens or `block` does not fit.
        """
        block = parse_block(block)
        mask = check_mask(mask)
        num_queries = check_tokens("num_queries", num_queries, mask.shape[1], block)
        num_keys = check_tokens("num_keys", num_keys, mask.shape[2], block)
        ranges = _patterns.mask_ranges(mask, block, num_queries, num_keys, causal)
        seen = mask | torch.ones_like(mask[0]).triu(1) if causal else mask
        pattern = ("causal" if causal else "dense") if bool(seen.all()) else "blocks"
        return cls._of(ranges, block, mask, pattern, num_queries, num_keys)

    @classmethod
    def from_ranges(
        cls,
        first_key: Tensor,
        end_key: Tensor,
        block: int = 64,
        *,
        num_keys: int | None = None,
        end_query: Tensor | None = None,
        mask: Tensor | None = None,
    ) -> Self:
        """Return the layout in which each query sees a range of keys, exact to the token.

        Example:
            >>> first = torch.arange(100) // 10 * 10  # documents of 10 tokens
            >>> Layout.from_ranges(first, first + 10, block=16).num_queries
            100

        Args:
            first_key: Integers `(queries,)`: the first key that each query sees.
            end_key: Integers `(queries,)`: the end of the keys that it sees.
            block: Tokens of a block: 16, 32, 64 or 128.
            num_keys: Keys; None for as many as queries.
            end_query: Integers `(keys,)`: the end of the queries that see a key; None for all.
            mask: As of `from_blocks`: blocks that may be listed; None for all.

        Raises:
            TypeError, ValueError: A dtype or a shape does not fit.
        """
        block = parse_block(block)
        check_vector("first_key", first_key)
        num_queries = len(first_key)
        num_keys = num_queries if num_keys is None else parse_count(num_keys, name="num_keys")
        check_vector("end_key", end_key, num_queries)
        if end_query is not None:
            check_vector("end_query", end_query, num_keys)
        ranges = _patterns.pad_ranges(first_key, end_key, end_query, num_keys, block)
        if mask is not None:
            mask = check_mask(mask)
            if mask.device != first_key.device:
                raise ValueError(
                    f"mask is on {mask.device}, but must be on {first_key.device}, as first_key is"
                )
            check_tokens("num_queries", num_queries, mask.shape[1], block)
            check_tokens("num_keys", num_keys, mask.shape[2], block)
        return cls._of(ranges, block, mask, "blocks", num_queries, num_keys)

    @classmethod
    def causal(cls, num_tokens: int, block: int = 64) -> Self:
        """Return the layout in which query i sees the keys up to i.

        Example:
            >>> Layout.causal(128).num_blocks
            3

        Args:
            num_tokens: Tokens of queries and keys; calls with fewer that need all blocks fit too.
            block: Tokens of a block: 16, 32, 64 or 128.
        """
        block = parse_block(block)
        num_blocks = -(-parse_count(num_tokens, name="num_tokens", least=1) // block)
        return cls.from_blocks(
            torch.ones(1, num_blocks, num_blocks, dtype=torch.bool, device="cpu"),
            block,
            causal=True,
        )

    @classmethod
    def documents(
        cls,
        lengths: Sequence[int] | Tensor,
        block: int = 64,
        *,
        causal: bool = True,
        window: int | None = None,
    ) -> Self:
        """Return the layout of documents that are packed into one sequence and see only themselves.

        Example:
            >>> layout = Layout.documents([100, 30, 126])
            >>> layout.num_queries, layout.num_blocks
            (256, 7)

        Args:
            lengths: Tokens of each document, in their order.
            block: Tokens of a block: 16, 32, 64 or 128.
            causal: Whether a query sees no key after it.
            window: The most keys that a causal query sees, itself included; where it is not causal,
                a query sees so many less one to either side. None for the whole document.

        Raises:
            TypeError: Lengths are no whole numbers.
            ValueError: A length or the window is not positive.
        """
        block = parse_block(block)
        lengths = as_numbers("lengths", lengths)
        if lengths.numel():
            check_integers("lengths", lengths)
        lengths = lengths.long()
        if lengths.dim() != 1 or lengths.numel() == 0 or bool((lengths < 1).any()):
            raise ValueError(
                f"lengths are {lengths.tolist()}, but must be positive and at least one"
            )
        if window is not None:  # one of all tokens is as good as a longer one
            window = min(parse_count(window, name="window", least=1), int(lengths.sum()))
        return cls.from_ranges(*_patterns.document_ranges(lengths, causal, window), block)

    @classmethod
    def window(cls, num_tokens: int, window: int, block: int = 64, *, causal: bool = True) -> Self:
        """Return the layout in which each query sees the keys close to it.

        Example:
            >>> Layout.window(256, 64).num_blocks
            7

        Args:
            num_tokens: Tokens of queries and keys.
            window: The most keys that a causal query sees, itself included; where it is not causal,
                a query sees so many less one to either side.
            block: Tokens of a block: 16, 32, 64 or 128.
            causal: Whether a query sees no key after it.
        """
        return cls.documents(
            [parse_count(num_tokens, name="num_tokens", least=1)],
            block,
            causal=causal,
            window=window,
        )

    @classmethod
    def strided(
        cls,
        num_tokens: int,
        block: int = 64,
        *,
        local_blocks: int = 4,
        stride: int = 4,
        causal: bool = True,
    ) -> Self:
        """Return the layout of the nearest blocks and of every `stride`-th one.

        The blocks are those of the fixed pattern of Child, Gray, Radford and Sutskever
        (arXiv:1904.10509, section 4.2), with blocks in the place of tokens.

        Example:
            >>> Layout.strided(1024, local_blocks=2, stride=4).num_blocks
            55

        Args:
            num_tokens: Tokens of queries and keys.
            block: Tokens of a block: 16, 32, 64 or 128.
            local_blocks: Key blocks up to a query's own, this one included (and so many after it
                where it is not causal).
            stride: The last one of so many key blocks is seen by all queries.
            causal: Whether query i sees no key after i.
        """
        block = parse_block(block)
        num_blocks = -(-parse_count(num_tokens, name="num_tokens", least=1) // block)
        mask = _patterns.strided_mask(
            num_blocks,
            parse_count(local_blocks, name="local_blocks", least=1),
            parse_count(stride, name="stride", least=1),
        )
        return cls.from_blocks(mask[None], block, causal=causal)

    @classmethod
    def bigbird(
        cls,
        num_tokens: int,
        block: int = 64,
        *,
        global_blocks: int = 1,
        window_blocks: int = 3,
        random_blocks: int = 2,
        heads: int = 1,
        seed: int = 0,
        causal: bool = False,
    ) -> Self:
        """Return the layout of BigBird: global, near and random blocks.

        Zaheer et al., arXiv:2007.14062, section 2; blocks as in its appendix D.

        Example:
            >>> Layout.bigbird(1024, heads=8).num_heads
            8

        Args:
            num_tokens: Tokens of queries and keys.
            block: Tokens of a block: 16, 32, 64 or 128.
            global_blocks: The first blocks, which see all and are seen by all.
            window_blocks: Key blocks around a query's own, this one included; odd.
            random_blocks: Further key blocks of each query block, drawn for each head.
            heads: Query heads, with random blocks of their own; 1 for the same in all.
            seed: Of the random blocks.
            causal: Whether query i sees no key after i; blocks are then drawn among earlier ones.
        """
        block = parse_block(block)
        num_blocks = -(-parse_count(num_tokens, name="num_tokens", least=1) // block)
        shape = (parse_count(heads, name="heads", least=1), num_blocks, num_blocks)
        numbers = (
            parse_count(global_blocks, name="global_blocks"),
            parse_count(window_blocks, name="window_blocks"),
            parse_count(random_blocks, name="random_blocks"),
        )
        seed = parse_count(seed, name="seed", least=-(2**63))  # as torch takes them
        mask = _patterns.bigbird_mask(shape, numbers, seed, causal=causal)
        return cls.from_blocks(mask, block, causal=causal)

    @classmethod
    def tree(cls, parents: Sequence[int] | Tensor, block: int = 64) -> Self:
        """Return the layout in which each token of a tree sees its ancestors and itself.

        Example:
            >>> layout = Layout.tree([-1, 0, 1, 0], block=16)  # 0 -> 1 -> 2 and 0 -> 3
            >>> layout.token_mask()[0, 3].tolist()
            [True, False, False, True]

        Args:
            parents: The parent of each token, -1 for a root. The tokens are in depth-first order:
                each one follows its parent or a descendant of that, so that descendants are ranges.
            block: Tokens of a block: 16, 32, 64 or 128.

        Raises:
            TypeError: Parents are no whole numbers.
            ValueError: The tokens are in another order, or there is none.
        """
        parents = as_numbers("parents", parents)
        check_vector("parents", parents, parents.numel())
        parents = parents.long()
        return cls.from_ranges(
            torch.zeros_like(parents),
            torch.arange(1, len(parents) + 1, device="cpu"),
            block,
            end_query=_patterns.descendant_ends(parents),
        )

    @classmethod
    def from_scores(
        cls, scores: Tensor, num_blocks: int, block: int = 64, *, causal: bool = False
    ) -> Self:
        """Return the layout of the key blocks with the highest scores for each query block.

        Example:
            >>> Layout.from_scores(torch.randn(8, 16, 16), 4, causal=True).num_heads
            8

        Args:
            scores: Floating `(heads or 1, query_blocks, key_blocks)`, as products of mean queries
                and mean keys of blocks. They get no gradient.
            num_blocks: Key blocks of a query block; fewer where it has no more.
            block: Tokens of a block: 16, 32, 64 or 128.
            causal: Whether query i sees no key after i. A query's own block is then the best.

        Raises:
            TypeError: `scores` are not floating.
            ValueError: A shape does not fit, or a score that counts is NaN.
        """
        check_scores(scores)
        mask = _patterns.best_mask(
            scores.detach(), parse_count(num_blocks, name="num_blocks", least=1), causal
        )
        return cls.from_blocks(mask, block, causal=causal)

    @classmethod
    def _of(
        cls,
        ranges: Ranges,
        block: int,
        mask: Tensor | None,
        pattern: str,
        num_queries: int | None,
        num_keys: int | None,
    ) -> Self:
        arrays = map(outlive_inference, (*list_blocks(ranges, block, mask), *ranges))
        return cls(block, pattern, num_queries, num_keys, *arrays)

    @classmethod
    def of_arrays(cls, arrays: Sequence[Tensor], block: int) -> Self:
        """Return a layout from the tensors of `arrays`, as an operator gets it."""
        return cls(block, "blocks", None, None, *arrays)

    @property
    def arrays(self) -> tuple[Tensor, ...]:
        """The tensors in the order of the attributes."""
        lists = BlockLists(*(getattr(self, name) for name in BlockLists._fields))
        return (*lists, *(getattr(self, name) for name in Ranges._fields))

    @property
    def num_heads(self) -> int:
        """Heads that have lists of their own; 1 where all share one."""
        return self.row_offsets.shape[0]

    @property
    def num_query_blocks(self) -> int:
        """Query blocks, the last one perhaps not full."""
        return self.row_offsets.shape[1] - 1

    @property
    def num_key_blocks(self) -> int:
        """Key blocks, the last one perhaps not full."""
        return self.column_offsets.shape[1] - 1

    @property
    def num_blocks(self) -> int:
        """Listed blocks of all heads."""
        return self.key_blocks.shape[0]

    @property
    def density(self) -> float:
        """Listed blocks as a share of all."""
        return self.num_blocks / (self.num_heads * self.num_query_blocks * self.num_key_blocks)

    @property
    def device(self) -> torch.device:
        """The device of the tensors."""
        return self.key_blocks.device

    def to(self, device: torch.device | str) -> Self:
        """Return the layout with its tensors on a device."""
        if self.device == torch.device(device):
            return self
        moved = [outlive_inference(each.to(device)) for each in self.arrays]
        return type(self)(self.block, self.pattern, self.num_queries, self.num_keys, *moved)

    def block_mask(self) -> Tensor:
        """Return which blocks are listed, bool `(heads, query_blocks, key_blocks)`."""
        shape = (self.num_heads, self.num_query_blocks, self.num_key_blocks)
        counts = self.row_offsets.diff(dim=1).flatten().long()
        row = torch.arange(counts.numel(), device=self.device).repeat_interleave(counts)
        mask = torch.zeros(shape, dtype=torch.bool, device=self.device)
        mask.view(-1, shape[2])[row, self.key_blocks.long()] = True
        return mask

    def token_mask(self, num_queries: int | None = None, num_keys: int | None = None) -> Tensor:
        """Return which queries see which keys, bool `(heads, queries, keys)`: to test and to show.

        Example:
            >>> Layout.causal(32, block=16).token_mask(2, 3).tolist()
            [[[True, False, False], [True, True, False]]]

        Args:
            num_queries: Queries; None for those of the layout, or all of its blocks.
            num_keys: The same for keys.

        Raises:
            TypeError: A number is no int.
            ValueError: A number is negative, or more than the blocks have.
        """
        num_queries = self.num_queries if num_queries is None else num_queries
        num_keys = self.num_keys if num_keys is None else num_keys
        lengths = {"num_queries": len(self.first_key), "num_keys": len(self.end_query)}
        for (name, most), value in zip(lengths.items(), (num_queries, num_keys), strict=True):
            if value is not None and parse_count(value, name=name) > most:
                raise ValueError(f"{name} is {value}, but layout has blocks of {most} tokens")
        query = torch.arange(len(self.first_key), device=self.device)[:num_queries, None]
        key = torch.arange(len(self.end_query), device=self.device)[:num_keys]
        seen = (self.first_key[:num_queries, None] <= key) & (key < self.end_key[query[:, 0], None])
        seen &= query < self.end_query[:num_keys]
        blocks = self.block_mask()
        return blocks[:, query // self.block, key // self.block] & seen
