"""How long `import penstock` takes after `import torch`, and what its first use adds.

Both are held against 0.3 s. Each repetition is a process of its own, since an import happens once;
the first one fills the page cache and is thrown away.
"""

import json
import os
import subprocess
import sys

from _rows import REPOSITORY, BenchmarkRow, Limit, argument_parser, environment, write_rows

LIMIT = Limit(name="0.3 s beyond `import torch`", value=0.3, unit="s")

CHILD = """
import json, time
import torch
start = time.perf_counter()
import penstock
imported = time.perf_counter()
penstock.offload
used = time.perf_counter()
print(json.dumps([imported - start, used - start]))
"""


def measure() -> tuple[float, float]:
    """Seconds from `import torch` to `import penstock`, and to `penstock.offload`."""
    path = os.pathsep.join([str(REPOSITORY / "src"), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        env={**os.environ, "PYTHONPATH": path.rstrip(os.pathsep)},
        stdout=subprocess.PIPE,
        text=True,
        check=True,
    )
    imported, used = json.loads(done.stdout)
    return imported, used


def main() -> None:
    parser = argument_parser(__doc__)
    parser.add_argument("--repetitions", type=int, default=9)
    arguments = parser.parse_args()
    measure()
    runs = [measure() for _ in range(arguments.repetitions)]
    where = environment(arguments.device)
    arms = {
        "import penstock": [imported for imported, _ in runs],
        "first use of offload": [used for _, used in runs],
    }
    rows = [
        BenchmarkRow.of(
            seconds, topic="import_time", case="after import torch", arm=arm, limit=LIMIT, **where
        )
        for arm, seconds in arms.items()
    ]
    for row in rows:
        print(row)
    write_rows(rows, arguments.out)


if __name__ == "__main__":
    main()
