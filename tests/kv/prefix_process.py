"""Program: go on from saved prefixes in a process of its own.

    python prefix_process.py DIRECTORY OUT_NAME KIND...

Each model begins with `DIRECTORY/KIND.kv` and the file of the store below, and generates from what
`DIRECTORY/KIND.pt` says.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch

import penstock
from kv_models import cache_bytes, generate, make_model


def main() -> None:
    torch.set_num_threads(1)
    directory, name, kinds = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    for kind in kinds:
        model = make_model(kind)
        asked = torch.load(directory / f"{kind}.pt")
        with penstock.kv.cache(
            model,
            device_memory=cache_bytes(model, 320) // 16,
            store=str(directory),
            block_tokens=16,
            prefix=directory / f"{kind}.kv",
        ) as cache:
            opened = cache.report()
            tokens = cache.prefix_tokens
            out = generate(model, asked["inputs"], asked["num_tokens"], past_key_values=cache)
            report = cache.report()
            torch.save(
                {
                    "sequences": out.sequences,
                    "logits": out.logits,
                    "tokens": tokens,
                    "opened": opened.to_dict(),
                    "report": report.to_dict(),
                },
                directory / f"{kind}.{name}",
            )


if __name__ == "__main__":
    main()
