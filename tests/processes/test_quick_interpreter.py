"""The quick interpreter of Triton gives the bits of Triton's own."""

from pathlib import Path

import pytest

from triton_tests import needs_triton, run_interpreted

HERE = Path(__file__).resolve().parent


@needs_triton
@pytest.mark.slow
def test_bits_are_those_of_the_interpreter():
    run_interpreted(HERE / "interpreted_operations.py", at_least=15)
