import os
from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def data() -> Path:
    """The folder of the inputs of the batching benchmarks, where there is one."""
    folder = Path(os.environ.get("PENSTOCK_DATA", "/nonexistent"), "batching")
    if not folder.exists():
        pytest.skip("PENSTOCK_DATA has no batching/")
    return folder
