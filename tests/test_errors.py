"""One `except PenstockError` catches everything that Penstock raises itself."""

import inspect
import pickle

import pytest

from penstock import errors

STORE_ERRORS = [
    errors.StoreUnavailableError,
    errors.StoreFullError,
    errors.StoreReadError,
    errors.StoreWriteError,
]


def test_every_error_is_a_penstock_error():
    classes = [value for _, value in inspect.getmembers(errors, inspect.isclass)]
    raised = [cls for cls in classes if not issubclass(cls, Warning)]
    assert {errors.StoreReadError, errors.PlanError, errors.TornStepError} <= set(raised)
    assert all(issubclass(cls, errors.PenstockError) for cls in raised)


@pytest.mark.parametrize("cls", STORE_ERRORS)
def test_store_errors_carry_where_and_why(cls: type[errors.StoreError]):
    error = cls("no", path="/mnt/nvme", offset=4096, errno=5)
    assert isinstance(error, errors.StoreError)
    assert (str(error), error.path, error.offset, error.errno) == ("no", "/mnt/nvme", 4096, 5)


def test_store_errors_survive_the_way_to_another_process():
    error = errors.StoreReadError("no", path="/mnt/nvme", offset=4096, errno=5)
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is errors.StoreReadError
    assert (str(copy), copy.path, copy.offset, copy.errno) == ("no", "/mnt/nvme", 4096, 5)


def test_store_warning_is_a_user_warning():
    assert issubclass(errors.StoreWarning, UserWarning)
