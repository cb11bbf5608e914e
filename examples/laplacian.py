"""Spectral embedding of a graph whose matrix lies in files: gowalla, or any graph of its format.

    python examples/laplacian.py graphs/gowalla_adj.npz --store /mnt/nvme --figure embedding.png

The edges are read from SciPy's format, the normalised adjacency matrix is written to files, and the
largest eigenvectors of it, which are the smoothest ones of the Laplacian, are found under a budget:
basis and matrix are read from the files as they are needed. The picture shows the nodes by the
second and the third of them, and the first eigenvalues of the Laplacian.
"""

import argparse
import tempfile
from pathlib import Path

import numpy as np
import torch
from _shared import panels, save, titled

import penstock
from penstock.spectral import CSR
from penstock.units import parse_bytes


def read_edges(path: str) -> tuple[np.ndarray, int]:
    """Return the edges (2, num_edges) of the largest component, and how many nodes it has."""
    with np.load(path) as file:
        shape = file["shape"]
        if "row" in file:
            rows, columns = file["row"], file["col"]
        else:
            rows = np.repeat(np.arange(shape[0]), np.diff(file["indptr"]))
            columns = file["indices"]
    num_nodes = int(max(shape))
    edges = np.stack([rows, columns]).astype(np.int64)
    edges = np.concatenate([edges, edges[::-1]], 1)
    edges = np.unique(edges[:, edges[0] != edges[1]], axis=1)
    labels = np.arange(num_nodes)
    while True:  # each node takes the least label around it
        least = labels.copy()
        np.minimum.at(least, edges[0], labels[edges[1]])
        least = least[least]
        if np.array_equal(least, labels):
            break
        labels = least
    kept = labels == np.bincount(labels).argmax()
    numbers = np.cumsum(kept) - 1
    return numbers[edges[:, kept[edges[0]]]], int(kept.sum())


def write_matrix(edges: np.ndarray, num_nodes: int, directory: Path) -> tuple[CSR, np.ndarray]:
    """Write D^-1/2 A D^-1/2 to files; return it, and the degrees."""
    degrees = np.bincount(edges[0], minlength=num_nodes)
    offsets = np.concatenate([[0], np.cumsum(degrees)]).astype(np.int32)
    order = np.lexsort((edges[1], edges[0]))
    rows, columns = edges[0][order], edges[1][order]
    np.save(directory / "columns.npy", columns.astype(np.int32))
    np.save(directory / "values.npy", 1 / np.sqrt(degrees[rows] * degrees[columns]))
    lists = (torch.from_numpy(offsets), directory / "columns.npy", directory / "values.npy")
    return CSR(*lists, shape=(num_nodes, num_nodes)), degrees


def draw(path: str, values: np.ndarray, points: np.ndarray, degrees: np.ndarray) -> None:
    figure, (left, right) = panels(2, width=9, height=4)
    order = np.argsort(degrees)
    # Ranks: a few nodes lie so far out that the others would be one dot.
    ranks = points.argsort(0).argsort(0) / len(points)
    shown = left.scatter(*ranks[order].T, c=np.log10(degrees[order]), s=1, linewidths=0, alpha=0.6)
    figure.colorbar(shown, ax=left, label="degree, decimal logarithm")
    titled(left, "nodes by the ranks of two eigenvectors")
    left.set_xlabel("second eigenvector")
    left.set_ylabel("third eigenvector")
    right.plot(range(1, len(values) + 1), values, "o-", markersize=4)
    right.set_xlabel("number")
    right.set_ylim(bottom=0)
    titled(right, "smallest eigenvalues of the normalised Laplacian")
    save(figure, path)


def main(arguments: list[str] | None = None) -> penstock.spectral.Eigenpairs:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("graph", help="a sparse matrix in SciPy's .npz")
    parser.add_argument("--store", default=tempfile.gettempdir(), help="a directory on a disk")
    parser.add_argument("--budget", default="24MiB", help="of memory for basis and matrix")
    parser.add_argument("--count", type=int, default=10, help="eigenvectors")
    parser.add_argument("--figure", default="embedding.png")
    options = parser.parse_args(arguments)
    edges, num_nodes = read_edges(options.graph)
    print(f"{num_nodes:,} nodes, {edges.shape[1] // 2:,} edges in the largest component")
    with tempfile.TemporaryDirectory(dir=options.store) as directory:
        matrix, degrees = write_matrix(edges, num_nodes, Path(directory))
        pairs = penstock.spectral.eigs(
            matrix,
            options.count,
            max_bytes=parse_bytes(options.budget),
            store=options.store,
            tol=1e-8,
        )
    values = 1 - pairs.values.flip(0).numpy()  # of the Laplacian, rising
    points = (pairs.vectors.flip(1).numpy() / np.sqrt(degrees)[:, None])[:, 1:3]
    print("eigenvalues of the Laplacian:", " ".join(f"{each:.5f}" for each in values))
    print(pairs.report)
    draw(options.figure, values, points, degrees)
    return pairs


if __name__ == "__main__":
    main()
