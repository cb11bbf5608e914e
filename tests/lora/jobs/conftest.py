"""A base for all tests of jobs, and four jobs trained alone on it."""

import pytest

from _jobs_cases import JOBS, add_job, make_llama, results_of
from penstock.lora.jobs import Jobs


@pytest.fixture
def llama():
    return make_llama()


@pytest.fixture(scope="session")
def base():
    """One Llama for tests that put it back."""
    return make_llama()


@pytest.fixture(scope="session")
def alone(base):
    """Losses and weights of each of the four jobs, trained alone."""
    found = {}
    for name in JOBS:
        with Jobs(base, max_tokens=128) as jobs:
            add_job(jobs, name)
            jobs.run()
            found |= results_of(jobs)
    return found
