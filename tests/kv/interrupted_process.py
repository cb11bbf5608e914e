"""Program: generate for ever with a cache over a store, to be killed or interrupted.

python interrupted_process.py STORE prefill|decode|save
"""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import torch

import penstock
from kv_models import generate, make_model, make_prompt
from penstock.memory import _transfers


def main() -> None:
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    store, what = Path(sys.argv[1]), sys.argv[2]
    model = make_model("llama")
    prompt = make_prompt(40 if what == "decode" else 600, batch_size=1)
    write = _transfers._pwritev
    with penstock.kv.cache(model, device_memory="48KiB", block_tokens=4, store=str(store)) as cache:
        while True:
            if what == "decode":
                generate(model, prompt, 400, past_key_values=cache, streamer=Ready())
            else:
                with torch.no_grad():
                    model(**prompt, past_key_values=cache)
                say_ready()
            if what == "save":

                def write_slowly(*args: object) -> int:
                    time.sleep(0.05)
                    return write(*args)  # pyright: ignore[reportArgumentType]

                _transfers._pwritev = write_slowly
                cache.save(store / "prefix")
                (store / "prefix").unlink()
                _transfers._pwritev = write
            cache.reset()


class Ready:
    """Streamer that says when some tokens are there."""

    def __init__(self) -> None:
        self._num_tokens = 0

    def put(self, _: torch.Tensor) -> None:
        self._num_tokens += 1
        if self._num_tokens == 30:
            say_ready()

    def end(self) -> None:
        pass


def say_ready() -> None:
    sys.stdout.write("ready\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
