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
    """Losses and weights of each of the four jobs, trained alone, and those after `EARLY` steps."""
    found, early = {}, {}
    for name in JOBS:
        with Jobs(base, max_tokens=128) as jobs:
            add_job(jobs, name, **changes)
            jobs.run(num_steps=EARLY)
            early |= results_of(jobs)
            jobs.run()
            found |= results_of(jobs)
    return found, early


_trained = {}  # steps after `EARLY` leave nothing else of those before


@pytest.fixture(scope="session")
def alone(base):
    """All steps of each job; 15 of "long", 50 of the others."""
    found, _trained["early"] = train_alone(base)
    return found


@pytest.fixture(scope="session")
def early(base):
    """The first `EARLY` steps of each job."""
    if "early" not in _trained:
        _, _trained["early"] = train_alone(base, num_steps=EARLY)
    return _trained["early"]
