"""A base for all tests of jobs, and four jobs trained alone on it."""

import pytest

from _jobs_cases import EARLY, JOBS, add_job, make_llama, results_of
from penstock.lora.jobs import Jobs


@pytest.fixture
def llama():
    return make_llama()


@pytest.fixture(scope="session")
def base():
    """One Llama for tests that put it back."""
    return make_llama()


def train_alone(base, **changes):
    """Losses and weights of each of the four jobs, trained alone."""
    found = {}
    for name in JOBS:
        with Jobs(base, max_tokens=128) as jobs:
            add_job(jobs, name, **changes)
            jobs.run()
            found |= results_of(jobs)
    return found


@pytest.fixture(scope="session")
def alone(base):
    """All steps of each job; 15 of "long", 50 of the others."""
    return train_alone(base)


@pytest.fixture(scope="session")
def early(base):
    """The first `EARLY` steps of each job."""
    return train_alone(base, num_steps=EARLY)
