"""Rows name code that is in the history, and the tables of the documentation say what rows say."""

import functools
import re
import subprocess

import pytest

from _rows import REPOSITORY, RESULTS, read_rows

DOCS = REPOSITORY / "docs"
FILES = sorted(RESULTS.glob("*/*.json"))
GRAPHS = {
    "AIFB": "aifb",
    "MUTAG": "mutag",
    "FB15k-237": "fb15k-237",
    "FB15k-237 without reverse edges": "fb15k-237 one-way",
    "WN18RR": "wn18rr",
    "mag-tiny": "mag-tiny",
    "typed graph with BGS's sizes": "bgs-sizes",
    "typed graph with AM's sizes": "am-sizes",
}


@functools.cache
def history() -> set[str]:
    git = ["git", "-C", str(REPOSITORY)]
    try:
        shallow = subprocess.run(
            [*git, "rev-parse", "--is-shallow-repository"], capture_output=True, text=True
        )
        log = subprocess.run([*git, "rev-list", "HEAD"], capture_output=True, text=True)
    except OSError:
        return set()
    if shallow.stdout.strip() != "false" or log.returncode:
        return set()
    return set(log.stdout.split())


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_rows_name_commits_of_the_history(path):
    commits = history()
    if not commits:
        pytest.skip("this copy has no history")
    unknown = {row.commit for row in read_rows(path)} - commits
    unknown = {commit for commit in unknown if commit.removesuffix("-dirty") not in commits}
    assert not unknown, (
        "measure on a commit that stays (a rebase renames it), or give PENSTOCK_COMMIT the one "
        "that it became"
    )


def table_after(page: str, header: str) -> list[list[str]]:
    """The cells of the table with this beginning of a header, row by row, its header first."""
    lines = (DOCS / page).read_text().splitlines()
    begin = next(i for i, line in enumerate(lines) if line.startswith(header))
    rows = []
    for line in lines[begin:]:
        if not line.startswith("|"):
            break
        if not line.startswith("|---"):
            rows.append([cell.strip() for cell in line.strip().strip("|").split("|")])
    return rows


def number(cell: str) -> float | None:
    """The number that a cell begins with; None if it has none."""
    found = re.match(r"[\d,]+(\.\d+)?", cell)
    return float(found[0].replace(",", "")) if found else None


def rounds_to(stated: float, measured: float) -> bool:
    """Whether a number with its digits is another one, rounded; three digits at most count."""
    return abs(stated - measured) <= max(0.005 * measured, 0.5 * 10 ** -decimals(stated))


def decimals(stated: float) -> int:
    text = f"{stated:g}"
    return len(text.partition(".")[2])


def test_the_table_of_relational_layers_is_that_of_the_rows():
    rows = {}
    for path in RESULTS.glob("*/rgnn.json"):
        rows |= {(row.case, row.arm): row for row in read_rows(path)}
    arms = {"PyG": 1, "segment-mm": 2, "penstock (cpp)": 3}
    ratios = {"PyG": 4, "segment-mm": 5}
    num_compared = 0
    for cells in table_after("rgnn.md", "| layer, graph |")[1:]:
        layer, _, graph = cells[0].partition(", ")
        case = f"{layer}, {GRAPHS[graph.partition(' (')[0]]}, d=64, training step"
        for arm, column in arms.items():
            stated = number(cells[column])
            if stated is None:
                continue
            row = rows[case, arm]
            assert rounds_to(stated, row.median_seconds * 1e3), (cells[0], arm, row.median_seconds)
            num_compared += 1
        for arm, column in ratios.items():
            stated = number(cells[column])
            if stated is not None:
                ratio = rows[case, arm].extra["ratio_to_ours"]["median"]
                assert rounds_to(stated, ratio), (cells[0], arm, ratio)
                num_compared += 1
    assert num_compared > 80


def test_the_table_of_plans_is_that_of_the_rows():
    shares = {}
    for path in RESULTS.glob("*/plan.json"):
        for row in read_rows(path):
            key = row.case.partition(" of its peak")[0], row.arm
            shares.setdefault(key, []).append(row.extra.get("share_of_ideal"))
    header, *table = table_after("planning.md", "| | 1/2 ")
    num_compared = 0
    for cells in table:
        for name, cell in zip(header, cells, strict=True):
            stated = number(cell)
            if not re.fullmatch(r"1/\d+", name) or stated is None:
                continue
            share = "minimum" if "*" in cell else name
            found = shares[f"{cells[0]}; {share}", "penstock"]
            assert None not in found
            # Of any machine: steps are simulated.
            assert any(abs(each - stated) <= 0.0051 for each in found), (cells[0], name, found)
            num_compared += 1
    assert num_compared > 30


@pytest.mark.parametrize("header", ["| network | operators |", "| step | operators | budget |"])
def test_the_tables_of_least_traffic_are_those_of_the_rows(header):
    rows = {}
    for path in sorted(RESULTS.glob("*/cosma.json")):
        for row in read_rows(path):
            rows.setdefault((row.case, row.arm), []).append(row.extra)
    columns = {
        "operators": ("exact", "num_operators"),
        "bytes": ("exact", "device_bytes"),
        "TFLite, Belady": ("TFLite arena, Belady", "traffic"),
        "exact": ("exact", "traffic"),
        "bound": ("exact", "least"),
        "auto": ("auto", "traffic"),
    }
    names, *table = table_after("planning-proofs.md", header)
    assert table
    for cells in table:
        case = f"{cells[0]}; {cells[names.index('budget')]}"
        for name, cell in zip(names, cells, strict=True):
            if name not in columns:
                continue
            arm, key = columns[name]
            found = [extra[key] for extra in rows[case, arm]]  # of any machine
            stated = number(cell)
            assert (None if stated is None else int(stated)) in found, (case, name, cell, found)


def test_the_table_of_lora_layers_is_that_of_the_rows():
    rows = {}
    for path in RESULTS.glob("*/lora.json"):
        rows |= {(row.case, row.arm): row for row in read_rows(path)}
    _, *table = table_after("lora.md", "| layer | PEFT, ms |")
    assert len(table) == 10
    ratios = {"PEFT, torch.compile": 2, "add into output": 3, "penstock": 4}
    for cells in table:
        case = f"layer: {cells[0]}"
        stated = number(cells[1])
        assert stated is not None
        assert rounds_to(stated, rows[case, "PEFT"].median_seconds * 1e3), cells
        for arm, column in ratios.items():
            ratio = rows[case, arm].extra["ratio_to_peft"]["median"]
            assert cells[column] == f"{ratio:.2f}", (cells, arm, ratio)
        for arm, column in {"PEFT": 5, "penstock": 6}.items():
            assert cells[column] == f"{rows[case, arm].peak_bytes['saved'] / 2**20:.1f}", cells


def test_the_tables_of_traversals_are_those_of_the_rows():
    rows = {}
    for path in RESULTS.glob("*/graphs.json"):
        rows |= {(row.case, row.arm): row for row in read_rows(path)}
    arms = ["penstock", "penstock, reverse", "penstock, files", "PyG k_hop_subgraph"]
    for cells in table_after("traversal.md", "| closure | nodes, edges |")[1:]:
        case = f"closure: {cells[0]}"
        for arm, cell in zip([*arms, "scipy.sparse"], cells[2:7], strict=True):
            assert rounds_to(number(cell) or 0, rows[case, arm].median_seconds * 1e3), (case, arm)
        extra = rows[case, "penstock"].extra
        assert cells[1] == f"{extra['num_nodes']:,}, {extra['num_edges']:,}"
        assert cells[7] == f"{rows[case, arms[3]].extra['times_of_ours']:.1f}"
    for cells in table_after("traversal.md", "| 8 hops from the node")[1:]:
        found = [rows[f"direction: {cells[0]}, 8 hops", arm].extra for arm in arms[:2]]
        sums = [sum(extra["touched_edges"]) for extra in found]
        shown = [f"{sums[0]:,}", f"{sums[1]:,}", f"{sums[1] / sums[0]:.3f}"]
        assert cells[1:] == [*shown, f"{found[0]['largest_frontier']:,}"]
    said = (DOCS / "traversal.md").read_text()
    ours = rows["bytes: gowalla, 3 hops, 64 seeds", "penstock"]
    assert f"{ours.extra['predicted_bytes']:,} bytes were predicted" in said
    assert f"{ours.peak_bytes['device']:,} at the peak" in said and ours.limit_fraction == 1


def test_the_table_of_partitions_is_that_of_the_rows():
    rows = {}
    for path in RESULTS.glob("*/partition.json"):
        rows |= {(row.case, row.arm): row for row in read_rows(path)}
    searches = {key for key, row in rows.items() if row.extra["times"] == "measured"}
    said = " ".join((DOCS / "partitioning.md").read_text().split())
    for row in map(rows.pop, searches):
        assert f"is partitioned in {row.median_seconds:.0f} s" in said
    table = table_after("partitioning.md", "| model over devices |")[1:]
    assert len(table) == len(rows) / 2
    for case, arm, *cells in table:
        theirs, ours = rows[case, arm], rows[case, f"auto, memory of {arm}"]
        held = [row.peak_bytes["device"] / 1e9 for row in (theirs, ours)]
        received = [row.extra["exchanged_bytes"] / 1e9 for row in (theirs, ours)]
        seconds = ours.extra["search_cpu_seconds"]
        expected = held[0], received[0], held[1], received[1], ours.limit_fraction, seconds
        for cell, value in zip(cells, expected, strict=True):
            assert rounds_to(float(cell), value), (case, arm)
        assert held[1] <= held[0]
        assert received[1] <= received[0]
