"""What every test shares: a store on a real disk, fixed seeds, a watch on what is left behind."""

import collections
import contextlib
import dataclasses
import functools
import gc
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

# Inductor's code for processors is scalar: to find their vector instructions it compiles a program
# for each, and starts a process that imports torch.
os.environ.setdefault("TORCHINDUCTOR_VEC_ISA_OK", "0")
# The garbage of each compiled frame waits for the next collection: looking takes 20 milliseconds.
os.environ.setdefault("TORCH_DYNAMO_RUN_GC_AFTER_COMPILE", "0")

import numpy as np
import pytest

import fork_servers
import quick_events
import quick_logs
import quick_tests
import rewritten_tests

if TYPE_CHECKING:
    from simulated_cuda import SimulatedCuda

try:
    from hypothesis import HealthCheck, settings
    from hypothesis.internal.conjecture import providers
except ImportError:  # a GPU machine may run the `gpu` tests without it
    pass
else:
    # Shared machines are noisy: no deadline for one example, and the same examples in every run.
    settings.register_profile(
        "penstock",
        deadline=None,
        derandomize=True,
        print_blob=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture],
    )
    settings.load_profile("penstock")
    # Numbers of the sources go into examples: of all modules that were imported until then, by
    # whatever tests ran before in this process, and at a cost of seconds.
    providers._get_local_constants = lambda: providers._local_constants

# A suite that a script starts in the background inherits an ignored Ctrl-C, and so would every
# child process that a test interrupts.
if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

REPOSITORY = Path(__file__).resolve().parent.parent
MEMORY_FILESYSTEMS = {"tmpfs", "ramfs", "devtmpfs"}
MANY_OBJECTS = 20_000
TESTS_TO_LOOK = 8  # for many objects, which takes a millisecond
GC_THRESHOLDS = 50_000, 20, 50  # a twentieth of a test's time goes by at Python's 700, 10, 10
# The clock of the processor is read so often: the kernel takes some 5 microseconds to say it, and
# limits of searches are 100 times as long as this at least.
SECONDS_TO_ASK = 5e-4
SECONDS_TO_END = 30.0  # how long worker threads may take to notice that their owner is gone


def filesystem_type(path: Path) -> str:
    """The type of the file system that holds `path`, by the kernel's mount table; "" if unknown."""
    best_length, best_type = -1, ""
    try:
        lines = Path("/proc/self/mountinfo").read_text().splitlines()
    except FileNotFoundError:  # not Linux
        return ""
    for line in lines:
        fields, _, rest = line.partition(" - ")
        mount_point = fields.split(" ")[4].encode().decode("unicode_escape")
        # Later mounts cover earlier ones, hence >=.
        if path.is_relative_to(mount_point) and len(mount_point) >= best_length:
            best_length, best_type = len(mount_point), rest.split(" ")[0]
    return best_type


def _real_disk(candidates: list[Path]) -> Path | None:
    for candidate in candidates:
        directory = candidate.resolve()
        if (
            directory.is_dir()
            and os.access(directory, os.W_OK)
            and filesystem_type(directory) not in MEMORY_FILESYSTEMS
        ):
            return directory
    return None


@pytest.fixture(scope="session")
def real_disk() -> Path:
    """A writable directory whose file system is not memory: the temporary one, or the next best."""
    candidates = [Path(tempfile.gettempdir()), Path("/var/tmp"), REPOSITORY, Path.home()]
    directory = _real_disk(candidates)
    if directory is None:
        pytest.fail(f"no directory on a real disk among {[str(c) for c in candidates]}; set TMPDIR")
    return directory


@pytest.fixture
def store(real_disk: Path) -> Iterator[Path]:
    """An empty directory on a real disk, for `penstock.offload(store)`; it must end up empty.

    Penstock's files have no name, so one that is listed here has been leaked.
    """
    directory = Path(tempfile.mkdtemp(prefix="penstock-test-", dir=real_disk))
    try:
        yield directory
        directory.chmod(0o700)  # a test may have taken its own rights away
        left = sorted(path.name for path in directory.iterdir())
        assert not left, f"files left in the store: {left}"
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture(autouse=True)
def _seeds() -> None:
    """The same random numbers in every run; torch only where the test module has imported it."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002 (for libraries under test that use the global generator)
    if (torch := sys.modules.get("torch")) is None:
        return
    torch.default_generator.manual_seed(0)
    if not _seed_devices:
        _seed_devices.append(_find_seed_devices(torch))
    _seed_devices[0](0)


_seed_devices: list[Callable[[int], object]] = []  # once torch is there


def _find_seed_devices(torch: ModuleType) -> Callable[[int], object]:
    """Return what seeds GPUs.

    Where CUDA is not there, `torch.manual_seed` writes down the stack for it, and for two others
    that are not there: a millisecond each, and nothing that a CPU does depends on it.
    """
    if torch.cuda.is_available():
        return torch.cuda.manual_seed_all
    for name in ("cuda", "xpu", "mtia"):
        module = getattr(torch, name, None)
        if hasattr(module, "manual_seed_all"):
            module.manual_seed_all = _seed_nothing
    return _seed_nothing


def _seed_nothing(seed: int) -> None:
    """Leave out a device that is not there."""


@pytest.fixture
def one_thread() -> Iterator[None]:
    """For small operators: they gain nothing from a second thread, which spins on a busy machine.

    A module asks for it with `pytestmark = pytest.mark.usefixtures("one_thread")`.
    """
    import torch

    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


@pytest.fixture
def processor_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits of time are those of this process's processor time, which other processes do not take.

    For tests whose result depends on how much of a search there is time for. The kernel is asked
    for it, which takes as long as a part of the search, only where some time has gone by.
    """
    wall, processor = time.monotonic, time.process_time
    asked, used = -1.0, 0.0

    def read() -> float:
        nonlocal asked, used
        if (now := wall()) - asked > SECONDS_TO_ASK:
            asked, used = now, processor()
        return used

    for clock in ("monotonic", "perf_counter"):
        monkeypatch.setattr(time, clock, read)


@pytest.fixture
def quick_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    """The samples of torch's `op_db`, without the two looks at the stack that take longer.

    One is for a unittest.TestCase, the other to name what has seeded a CUDA that is not there.
    """
    import torch
    from torch.testing._internal import common_utils
    from torch.testing._internal.opinfo import core

    monkeypatch.setattr(torch, "manual_seed", torch.default_generator.manual_seed)
    for module in (common_utils, core):
        monkeypatch.setattr(module, "extract_test_fn", lambda: None)


@pytest.fixture
def quick_probe(monkeypatch: pytest.MonkeyPatch) -> None:
    """Few small runs, for tests that are not about how well a machine is measured."""
    from penstock.memory import _caches, _probe

    monkeypatch.setattr(_probe, "_LINK_SECONDS", 0.0)
    monkeypatch.setattr(_probe, "_RUN_SECONDS", 0.0)  # as on a slow disk
    monkeypatch.setattr(_probe, "_BOTH_WAYS_SECONDS", 0.01)
    monkeypatch.setattr(_probe, "_MEMCPY_BYTES", 2**20)
    monkeypatch.setattr(_probe, "_MATRIX_ROWS", {"cpu": 64, "cuda": 64})
    monkeypatch.setattr(_probe, "_VECTOR_BYTES", {"cpu": 2**16, "cuda": 2**16})
    monkeypatch.setattr(_probe, "_REQUEST_BYTES", 2**20)
    monkeypatch.setattr(_probe, "_CACHE_RUN_BYTES", 2**20)
    pages = functools.partial(_probe.measure_pages, num_runs=2, num_bytes=2**22)
    monkeypatch.setattr(_probe, "measure_pages", pages)
    monkeypatch.setattr(_caches, "_NUM_ROWS_READ", 2**13)


@pytest.fixture
def probed_store(store: Path, quick_probe: None) -> Path:
    """A store with a profile that programs find, which would measure the machine for seconds."""
    import penstock

    penstock.probe(store)
    return store


@pytest.fixture(scope="session")
def interpreter_of_triton() -> Iterator[None]:
    """Triton's interpreter without needless work; see `quick_interpreter.py`."""
    from quick_interpreter import quick_interpreter

    with quick_interpreter():
        yield


@pytest.fixture
def simulated_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator["SimulatedCuda"]:
    """A CUDA device on which nothing runs before it is waited for; see `simulated_cuda.py`."""
    from simulated_cuda import SimulatedCuda

    cuda = SimulatedCuda().install(monkeypatch)
    yield cuda
    cuda.close()


def _unnamed_files() -> set[str]:
    """Open files on disk that no directory lists: the kernel keeps them for a store still open."""
    found = set()
    descriptors = "/proc/self/fd"
    if not os.path.isdir(descriptors):
        return found
    for number in os.listdir(descriptors):
        try:
            if os.fstat(int(number)).st_nlink:  # a link takes ten times as long to read
                continue
            target = os.readlink(f"{descriptors}/{number}")
        except OSError:  # the descriptor that listed the directory
            continue
        # O_TMPFILE looks like "/dir/#1234 (deleted)"; torch has unnamed shared memory of its own.
        if target.endswith("(deleted)") and not target.startswith(("/memfd:", "/dev/shm/")):
            found.add(f"{number} -> {target}")
    return found


def _num_allocating() -> int:
    """How many uses of the caching allocator have begun and not ended."""
    allocators = sys.modules.get("penstock.memory._cpu_allocator")
    return 0 if allocators is None else allocators.CachingAllocator.instance()._num_acquired


def _left_behind(threads: set[threading.Thread], files: set[str], num_allocating: int) -> list[str]:
    """What was not there before: Penstock's threads (named "penstock..."), unnamed files, and
    uses of its allocator.
    """
    names = [
        f"thread {thread.name}"
        for thread in threading.enumerate()
        if thread not in threads and thread.name.startswith("penstock")
    ]
    names += [f"file {name}" for name in sorted(_unnamed_files() - files)]
    return names + ["the allocator, in use"] * (_num_allocating() - num_allocating)


@pytest.fixture(autouse=True)
def _nothing_left_behind() -> Iterator[None]:
    """Fail a test that leaves a thread running, an unnamed file open or the allocator in use."""
    before = set(threading.enumerate()), _unnamed_files(), _num_allocating()
    yield
    if not _left_behind(*before):
        return
    # Objects in reference cycles, tracebacks above all, end with the next collection; those that a
    # thread holds until it ends, with one after that.
    gc.collect()
    deadline = time.monotonic() + SECONDS_TO_END
    while left := _left_behind(*before):
        if time.monotonic() > deadline:
            pytest.fail(f"left behind by this test: {', '.join(left)}")
        time.sleep(0.01)
        gc.collect()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Have plans judged twice from the first test on that finds the planner imported."""
    api = sys.modules.get("penstock.planner._api")
    if api is not None and not hasattr(api, "judged_twice"):
        _judge_twice(api)


def _judge_twice(api: Any) -> None:
    """Let a replay of bytes judge every plan that `plan` makes and that `check` replays.

    What `check` finds wrong the other judge has to find wrong as well, and the other way round.
    """
    sys.path.insert(0, str(REPOSITORY / "tests" / "planner"))
    from byte_replay import judge
    from penstock.errors import PlanError
    from penstock.planner import Plan
    from penstock.planner._replay import Replay

    make, replay = api._plan_whole_or_split, Replay.run
    right = weakref.WeakValueDictionary()  # plans of whole graphs that need no second judgement
    # By the planners, with the graphs of their operators; `plan` returns copies of them.
    made = collections.deque(maxlen=8)
    fields = [each.name for each in dataclasses.fields(Plan) if each.name != "times"]

    def is_judged(plan, graph) -> bool:
        """Return whether all that is judged of a plan is of one that was found right."""
        is_whole = plan.graph_digest == graph.digest
        return (is_whole and right.get(id(plan)) is plan) or any(
            (is_whole or parts() is graph)
            and all(getattr(plan, name) is getattr(each, name) for name in fields)
            for each, parts in made
        )

    def plan_and_judge(request, *args, **kwargs):
        plan = make(request, *args, **kwargs)
        if wrong := judge(request.graph, plan):
            pytest.fail(f"a plan that was made is wrong: {wrong}")
        right[id(plan)] = plan
        made.append((plan, weakref.ref(plan.planned_graph(request.graph))))
        return plan

    def replay_and_judge(self: Replay) -> None:
        wrong = None
        if not is_judged(self.plan, self.graph):
            wrong = judge(self.graph, self.plan, is_planned_graph=True)
        error = None
        try:
            replay(self)
        except PlanError as found:
            error = found
        if (error is None) != (wrong is None):
            pytest.fail(f"two judges of a plan disagree: check {error}, bytes {wrong}")
        if error is not None:
            raise error
        if self.plan.graph_digest == self.graph.digest:
            right[id(self.plan)] = self.plan

    api._plan_whole_or_split, Replay.run = plan_and_judge, replay_and_judge
    api.judged_twice = True


@pytest.fixture(params=["meta", "float64", "bfloat16"])
def other_defaults(
    request: pytest.FixtureRequest,
) -> Callable[[], contextlib.AbstractContextManager[Any]]:
    """A function that returns a context with another default device, or dtype, of torch."""
    import torch

    @contextlib.contextmanager
    def default_dtype() -> Iterator[None]:
        before = torch.get_default_dtype()
        torch.set_default_dtype(getattr(torch, request.param))
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    return (lambda: torch.device("meta")) if request.param == "meta" else default_dtype


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """With `-m gpu`, leave out files that do not name the mark: importing all takes minutes."""
    if config.option.markexpr.strip() != "gpu" or collection_path.suffix != ".py":
        return None
    return True if "mark.gpu" not in collection_path.read_text() else None


def _share_processors(num_workers: int) -> None:
    """Give workers few threads: those that wait for theirs in a loop take them from the others.

    NumPy and torch read it when they are imported; child processes inherit it.
    """
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, (os.cpu_count() or 1) // num_workers)))
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")  # in tests that ask for more threads


@pytest.hookimpl(optionalhook=True)
def pytest_configure_node(node: Any) -> None:
    """Tell a worker what its interpreter is: it was started by a launcher (`fork_servers.py`)."""
    node.workerinput["python"] = sys.executable


def pytest_configure(config: pytest.Config) -> None:
    """Let pass what torch 2.11 says of sparse tensors whose invariants are checked, too.

    One process, of those of a run, starts the fork servers (see `fork_servers.py`), which fork the
    workers as well, and rewrites assertions before these would each do that (`rewritten_tests.py`).
    Collecting makes many objects and next to no cycles: looking for these takes seconds.
    """
    gc.disable()
    quick_logs.quicken(config)
    config.pluginmanager.register(quick_tests.QuickTests())
    if (worker := getattr(config, "workerinput", None)) is not None:
        sys.executable = worker["python"]
        quick_events.quicken_worker(config.pluginmanager)
    num_workers = getattr(config.option, "numprocesses", None) or 0
    if num_workers > 1:
        _share_processors(num_workers)
    if worker is None and fork_servers.VARIABLE not in os.environ and sys.platform == "linux":
        servers = fork_servers.ForkServers()
        os.environ[fork_servers.VARIABLE] = str(servers.directory)
        config.add_cleanup(servers.close)
    if worker is None and num_workers:
        quick_events.quicken_controller()
        python = fork_servers.find_python("libraries")
        config.option.tx = [f"popen//python={python}"] * num_workers
        with fork_servers.importing("libraries"):
            rewritten_tests.rewrite_all(config, rewritten_tests.list_tests(config))
    if fork_servers.VARIABLE in os.environ:  # for processes that a test spawns
        multiprocessing.set_executable(fork_servers.find_python("dynamo"))
    # Threads of the backward pass have no context of their own before their first product.
    config.addinivalue_line("filterwarnings", "ignore:Attempting to run cuBLAS:UserWarning")
    if metadata.version("torch").startswith("2.11."):
        config.addinivalue_line(
            "filterwarnings", "ignore:Sparse invariant checks are implicitly disabled:UserWarning"
        )


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers() -> int:
    """One worker more than processors: some always wait, for child processes and the disk."""
    return (os.cpu_count() or 1) + 1


def pytest_collection_finish() -> None:
    """Take what the imports have made out of collections, and out of captures, which look at all
    objects there are (see `penstock.graph.capturing._conditions`): there are thousands of these.
    """
    gc.enable()
    gc.collect()
    gc.freeze()
    gc.set_threshold(*GC_THRESHOLDS)
    if (guards := sys.modules.get("torch._dynamo.guards")) is not None:
        # For a metric that nobody reads, torch empties caches and times the guards of each frame.
        guards.profile_guard_manager = lambda *_: 0.0


_num_ended = [0]


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown() -> None:
    """Do the same where tests have left much: libraries that they imported, and caches."""
    _num_ended[0] += 1
    if _num_ended[0] % TESTS_TO_LOOK == 0 and len(gc.get_objects()) > MANY_OBJECTS:
        gc.collect()
        gc.freeze()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the slow tests, for which others would wait at the end.

    Skip `gpu` tests where there is no GPU; torch is imported only if one was collected.
    """
    items.sort(key=lambda item: item.get_closest_marker("slow") is None)
    gpu_items = [item for item in items if item.get_closest_marker("gpu")]
    if not gpu_items:
        return
    import torch

    if not torch.cuda.is_available():
        for item in gpu_items:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
