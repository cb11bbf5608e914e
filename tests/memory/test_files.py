"""Results are written whole or not at all, and only regular files are replaced."""

import os
import resource
import stat
import subprocess
import sys
import threading
from pathlib import Path

import pytest

import penstock.memory
from penstock.memory.files import check_replaceable, is_replaceable, replace_file


def test_a_full_disk_leaves_the_earlier_file_and_nothing_beside_it(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text("earlier")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))  # as good as a full disk
    try:
        with pytest.raises(OSError, match=r"plan\.json"):
            replace_file(path, b"x" * 8192)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert path.read_text() == "earlier"
    assert list(tmp_path.iterdir()) == [path]


def test_what_is_replaced_keeps_its_links_and_its_mode(tmp_path):
    path, link, loose = tmp_path / "a" / "real", tmp_path / "link", tmp_path / "loose"
    path.parent.mkdir()
    path.write_text("a longer text than the new one")
    path.chmod(0o640)
    link.symlink_to(path)
    loose.symlink_to(tmp_path / "a" / "new")
    for each, text in ((link, "1"), (loose, "\N{GREEK SMALL LETTER MU}")):
        check_replaceable(each)
        replace_file(each, text)
        assert each.is_symlink() and each.read_text("utf-8") == text
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    assert sorted(os.listdir(path.parent)) == ["new", "real"]


def test_a_pipe_is_written_and_stays(tmp_path):
    pipe, seen = tmp_path / "pipe", []
    os.mkfifo(pipe)
    check_replaceable(pipe)
    assert not is_replaceable(pipe)
    reader = threading.Thread(target=lambda: seen.append(pipe.read_text()), name="penstock-reader")
    reader.start()
    replace_file(pipe, "report")
    reader.join(10)
    assert seen == ["report"]
    assert stat.S_ISFIFO(pipe.stat().st_mode)


def test_a_device_is_written_and_stays(tmp_path):
    device = tmp_path / "null"
    try:
        os.mknod(device, stat.S_IFCHR | 0o600, os.makedev(1, 3))
        device.write_text("")
    except PermissionError:
        pytest.skip("devices cannot be made or opened here")
    check_replaceable(device)
    replace_file(device, "report")
    assert stat.S_ISCHR(device.stat().st_mode)
    assert list(tmp_path.iterdir()) == [device]


def test_the_file_that_standard_output_goes_to_is_appended_to(tmp_path):
    code = (
        "import sys; from penstock.memory.files import replace_file; "
        "print('printed'); replace_file('/dev/stdout', 'result\\n')"
    )
    source = str(Path(penstock.memory.__file__).parents[2])
    with (tmp_path / "log").open("w") as log:
        command = [sys.executable, "-c", code]
        subprocess.run(
            command, stdout=log, env={**os.environ, "PYTHONPATH": source}, check=True, timeout=60
        )
        assert os.path.samestat(os.fstat(log.fileno()), (tmp_path / "log").stat())
    assert (tmp_path / "log").read_text() == "printed\nresult\n"


@pytest.mark.parametrize("name", ["", "missing/x.json", "file/x.json"])
def test_what_cannot_be_written_is_refused_before_and_named(name, tmp_path):
    (tmp_path / "file").touch()
    for write in (check_replaceable, lambda path: replace_file(path, "x")):
        with pytest.raises(OSError) as caught:
            write(tmp_path / name)
        assert caught.value.filename is not None
    assert os.listdir(tmp_path) == ["file"]


def test_a_folder_that_takes_no_files_is_refused_although_it_says_that_it_is_writable():
    with pytest.raises(OSError, match="No such file"):
        check_replaceable("/proc/x.json")
