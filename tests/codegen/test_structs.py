"""Dataclasses as structs of C++: the fields that it reads, in its order and of its types."""

import ctypes
import dataclasses

import numpy as np
import pytest
import torch

from penstock.codegen import load_library, struct_type, to_struct

SOURCE = """
#include <cstdint>
struct Request {
  int64_t num_items;
  const int64_t* sizes;
  double factor;
  int64_t squared;
  const float* weights;
};
struct Answer {
  double total;
  int64_t has_weights;
};
extern "C" void add_up(const Request* request, Answer* answer) {
  answer->total = 0;
  for (int64_t i = 0; i < request->num_items; ++i) {
    double size = request->sizes[i] * request->factor;
    if (request->squared) size *= size;
    answer->total += request->weights ? size * request->weights[i] : size;
  }
  answer->has_weights = request->weights != nullptr;
}
"""


@dataclasses.dataclass(frozen=True)
class Request:
    num_items: int
    sizes: np.ndarray
    factor: float
    squared: bool
    weights: torch.Tensor | None


@dataclasses.dataclass
class Answer:
    total: float
    has_weights: int


@pytest.mark.parametrize(
    ("squared", "weights", "expected"),
    [(False, None, 3.5), (True, None, 6.25), (True, torch.tensor([2.0, 1.0]), 8.5)],
)
def test_what_python_says_is_what_cpp_reads(squared, weights, expected):
    library = load_library("structs", SOURCE)
    answer = struct_type(Answer)()
    request = to_struct(Request(2, np.array([3, 4]), 0.5, squared, weights))
    library.add_up(ctypes.byref(request), ctypes.byref(answer))
    assert (answer.total, answer.has_weights) == (expected, weights is not None)


def test_arrays_live_as_long_as_the_struct():
    struct = to_struct(Request(2, np.array([3, 4]), 0.5, False, None))
    assert struct.arguments.sizes.ctypes.data == struct.sizes


@pytest.mark.parametrize("what", [np.zeros((4, 4)).T[1:], torch.zeros(4)[::2]])
def test_what_is_not_contiguous_is_refused(what):
    with pytest.raises(ValueError, match="sizes must be contiguous"):
        to_struct(Request(2, what, 0.5, False, None))


@pytest.mark.parametrize("turn", [torch.conj, torch._neg_view])
def test_what_is_conjugated_or_negated_lazily_is_refused(turn):
    with pytest.raises(ValueError, match="sizes must have its numbers in memory"):
        to_struct(Request(2, turn(torch.zeros(4, dtype=torch.complex64)), 0.5, False, None))


def test_the_struct_of_a_dataclass_is_made_once():
    assert struct_type(Request) is struct_type(Request)
    assert [name for name, *_ in struct_type(Request)._fields_] == [
        "num_items", "sizes", "factor", "squared", "weights"
    ]  # fmt: skip


def test_annotations_that_are_texts_say_the_same():
    @dataclasses.dataclass
    class Quoted:
        number: "int"
        share: "float"
        array: "np.ndarray | None"

    types = [kind for _, kind, *_ in struct_type(Quoted)._fields_]
    assert types == [ctypes.c_int64, ctypes.c_double, ctypes.c_void_p]
