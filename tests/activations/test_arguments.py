"""Arguments of `offload` and its stores that are refused, and what is said of them."""

from __future__ import annotations

import warnings
from pathlib import Path

import pytest
import torch

import penstock
from penstock.errors import StoreError, StoreFullError, StoreWarning, stacklevel_of_user
from penstock.memory import FileStore, _store


def test_the_home_directory_is_found(store, monkeypatch):
    monkeypatch.setenv("HOME", str(store))
    assert FileStore("~").path == str(store)
    with pytest.raises(StoreError, match="penstock-no-such-directory"):
        penstock.offload("~/penstock-no-such-directory")


def test_a_tensor_is_no_size(store):
    with pytest.raises(TypeError, match="device_memory must be"):
        penstock.offload(store, device_memory=torch.tensor(5))  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there host memory comes first")
def test_a_store_in_which_nothing_fits_is_refused(store):
    with pytest.raises(ValueError, match="max_bytes=4096 is below min_bytes=1048576"):
        penstock.offload(FileStore(store, max_bytes=4096))


def test_the_reserve_is_an_argument_that_the_error_names(store):
    with pytest.raises(StoreFullError, match=r"FileStore\(reserve_bytes=\)"):
        penstock.offload(FileStore(store, reserve_bytes="1000TiB"))
    penstock.offload(FileStore(store, reserve_bytes="0B")).close()


def test_a_warning_points_at_the_users_line(store, monkeypatch):
    monkeypatch.setattr(_store, "filesystem_type", lambda path: "tmpfs")
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        penstock.offload(store).close()
    assert [each.category for each in said] == [StoreWarning]
    assert Path(said[0].filename) == Path(__file__)
    assert stacklevel_of_user() == 1
