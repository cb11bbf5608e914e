"""The time of the first call of a layer in a new process; `rgnn.py` runs this.

The first call traces, plans, generates and compiles the forward and the backward, or finds them in
the cache of generated code. The graph is small, so that little but that is measured, and PyTorch
has made a step of its own before. Prints the seconds of the first and of a later step as JSON.
"""

from __future__ import annotations

import argparse
import json

import torch

from _rgnn_arms import MODELS, Layer, OurProgram
from _rgnn_steps import TRAINING, Step
from penstock.rgnn import Graph

NUM_NODES, NUM_EDGES, NUM_RELATIONS, WIDTH = 1000, 5000, 20, 64


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS, required=True)
    parser.add_argument("--backend", default="auto")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    linear = torch.nn.Linear(WIDTH, WIDTH).to(options.device)
    out = linear(torch.randn(NUM_NODES, WIDTH, device=options.device))
    out.backward(torch.ones_like(out))  # with a gradient given, as below: PyTorch imports for it
    torch.manual_seed(0)
    edge_index = torch.randint(0, NUM_NODES, (2, NUM_EDGES))
    graph = Graph(edge_index, torch.randint(0, NUM_RELATIONS, (NUM_EDGES,))).to(options.device)
    layer = Layer(options.model, graph, WIDTH)
    step = Step(OurProgram(layer, options.backend).arm(), TRAINING, options.device)
    print(json.dumps([step.timed(), step.timed()]))


if __name__ == "__main__":
    main()
