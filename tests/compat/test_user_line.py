"""The user's line: the innermost one that is not torch's, Python's or Penstock's."""

import os
import textwrap
import types

import pytest
import torch
from torch.utils.data import default_collate

import penstock.units
from penstock.compat.user_line import (
    PENSTOCK,
    UserLine,
    is_raised_by_user,
    is_user_file,
    user_line,
    user_line_of,
)


def raised_by(function, *args) -> Exception:
    with pytest.raises(Exception) as caught:
        function(*args)
    return caught.value


def test_the_line_that_calls():
    line = user_line()
    assert line is not None
    assert line.file == __file__ and line.text == "line = user_line()"
    assert line.function == "test_the_line_that_calls"
    assert str(line) == f"{__file__}:{line.number}, in {line.function}: line = user_line()"


def test_frames_of_torch_are_passed_over():
    seen = []

    class Reader(list):
        def __getitem__(self, index):
            seen.append(user_line())
            return super().__getitem__(index)

    torch.utils.data.DataLoader(Reader([1.0]))
    hook = torch.nn.Identity()
    hook.register_forward_hook(eval("lambda *_: seen.append(user_line())", locals() | globals()))
    hook(torch.ones(1))
    assert [line.function for line in seen] == ["test_frames_of_torch_are_passed_over"]


@pytest.mark.parametrize(
    ("raise_", "text", "is_users"),
    [
        (lambda: default_collate([object()]), "default_collate([object()])", False),
        (lambda: penstock.units.parse_bytes("x"), 'penstock.units.parse_bytes("x")', False),
        (lambda: textwrap.indent(None, ""), "textwrap.indent(None", False),
        (lambda: 1 // 0, "1 // 0", True),
    ],
)
def test_the_line_that_an_error_comes_from(raise_, text, is_users):
    error = raised_by(raise_)
    line = user_line_of(error)
    assert line is not None and line.file == __file__ and text in line.text
    assert is_raised_by_user(error) is is_users


def test_programs_of_penstock_can_count_as_the_users():
    error = raised_by(penstock.units.parse_bytes, "x")
    line = user_line_of(error, programs=f"{PENSTOCK}units")
    assert line is not None and line.file == penstock.units.__file__
    assert line.function == "_parse_text"


def test_an_error_that_was_never_raised_has_no_line():
    assert user_line_of(ValueError("x")) is None
    assert is_raised_by_user(ValueError("x"))


@pytest.mark.parametrize(
    ("file", "expected"),
    [
        (torch.nn.__file__, False),
        (penstock.__file__, False),
        (types.__file__, False),
        ("<string>", False),
        ("<frozen importlib._bootstrap>", False),
        (os.path.join(os.path.dirname(types.__file__), "site-packages", "models.py"), True),
        ("/home/me/train.py", True),
    ],
)
def test_files(file, expected):
    assert is_user_file(file) is expected


def test_a_line_without_source_is_a_place():
    assert str(UserLine("/nowhere.py", 3, "f")) == "/nowhere.py:3, in f"
