"""Time to capture a training step, by the number of its operators.

Models are on the meta device, so that nothing but the capture is measured; the time is this
process's own processor time. 20,000 operators are to take at most 20 s.
"""

import functools
import time
from collections.abc import Callable

import torch
from torch import nn

from _rows import BenchmarkRow, Limit, argument_parser, environment, write_rows
from penstock.graph import Kind, capture

Case = tuple[nn.Module, dict[str, torch.Tensor]]


def gpt2(num_layers: int) -> Case:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(n_layer=num_layers, bos_token_id=0, eos_token_id=0)
    with torch.device("meta"):
        model = GPT2LMHeadModel(config).train()
    ids = torch.zeros(4, 512, dtype=torch.long)
    return model, {"input_ids": ids, "labels": ids}


def llama_70b() -> Case:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        hidden_size=8192,
        intermediate_size=28672,
        num_hidden_layers=80,
        num_attention_heads=64,
        num_key_value_heads=8,
        vocab_size=128256,
        use_cache=False,
    )
    with torch.device("meta"):
        model = LlamaForCausalLM(config).train()
    ids = torch.zeros(1, 4096, dtype=torch.long)
    return model, {"input_ids": ids, "labels": ids}


def measure(make: Callable[[], Case]) -> tuple[float, dict[str, float]]:
    """Return the seconds of processor time of one capture, and counts of its graph."""
    model, batch = make()
    optimizer = torch.optim.AdamW(model.parameters())
    start, start_cpu = time.perf_counter(), time.process_time()
    graph = capture(model, optimizer, batch)
    seconds = time.process_time() - start_cpu
    parameters = [each for each in graph.storages if each.kind is Kind.PARAMETER]
    return seconds, {
        "num_operators": len(graph.operators),
        "num_storages": len(graph.storages),
        "parameter_bytes": sum(storage.num_bytes for storage in parameters),
        "flops": sum(operator.flops for operator in graph.operators),
        "wall_seconds": time.perf_counter() - start,
    }


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--layers", type=int, nargs="*", default=[12, 48, 105])
    arguments = parser.parse_args()
    where = environment(arguments.device)
    cases: dict[str, Callable[[], Case]] = {
        f"gpt2 layers {layers}": functools.partial(gpt2, layers) for layers in arguments.layers
    }
    cases["llama 70b"] = llama_70b
    measure(functools.partial(gpt2, 1))  # imports, and torch's own caches
    rows = []
    for case, make in cases.items():
        seconds, found = measure(make)
        limit = Limit(name="1 ms an operator", value=found["num_operators"] / 1000, unit="s")
        rows.append(
            BenchmarkRow.of(
                [seconds],
                topic="capture",
                case=case,
                arm="adamw",
                limit=limit,
                extra=found,
                **where,
            )
        )
        print(rows[-1], f"{found['num_operators']} operators", flush=True)
    write_rows(rows, arguments.out)


if __name__ == "__main__":
    main()
