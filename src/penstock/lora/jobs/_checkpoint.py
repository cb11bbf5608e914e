"""Checkpoints: a folder with a link to the latest one, which is never half written.

    path/latest -> checkpoint-000001      replaced by one rename, after all below is on the disk
    path/checkpoint-000001/jobs.json      steps, losses, settings, fingerprints of data and base
    path/checkpoint-000001/NAME/          adapter_config.json, adapter_model.safetensors as PEFT's
    path/checkpoint-000001/NAME.pt        state of optimizer and schedule

Whatever ends the process, `latest` names a whole checkpoint: the one before or the new one.
"""

from __future__ import annotations

import hashlib
import json
import os
import pickle
import re
import shutil
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from penstock.lora.jobs._job import TrainingJob

_VERSION = 1
_NOT_COMPARED = {
    "inference_mode", "base_model_name_or_path", "revision", "peft_version", "auto_mapping",
}  # fmt: skip


def write_adapter(peft_model: Any, job: TrainingJob, folder: Path) -> None:
    """Write a job's adapter as PEFT does, so that stock PEFT loads it.

    Args:
        peft_model: The PEFT model that has the adapter.
        job: The job.
        folder: Folder to be made.
    """
    import copy

    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    state = {
        key: each.detach().to("cpu").contiguous().clone()
        for key, each in adapter_state(peft_model, job.name).items()
    }
    save_file(state, folder / "adapter_model.safetensors", metadata={"format": "pt"})
    config = copy.deepcopy(peft_model.peft_config[job.name])
    config.inference_mode = True
    if config.task_type is None:
        base = peft_model.get_base_model()
        config.auto_mapping = {
            "base_model_class": type(base).__name__,
            "parent_library": type(base).__module__,
        }
    config.save_pretrained(str(folder))


def adapter_state(peft_model: Any, name: str) -> dict[str, Tensor]:
    """Return an adapter's matrices under PEFT's names; they share the parameters' storage."""
    from peft import get_peft_model_state_dict

    return get_peft_model_state_dict(peft_model, adapter_name=name, save_embedding_layers=False)


def write_checkpoint(
    path: Path, header: dict[str, Any], peft_model: Any, jobs: Any, own: set[Path]
) -> Path:
    """Write a checkpoint, make it the latest, and remove those before.

    Args:
        path: Folder of the checkpoints.
        header: Plain data that is kept beside the jobs.
        peft_model: The PEFT model that has the adapters.
        jobs: The jobs, as a sequence.
        own: Checkpoints that these jobs wrote or restored; gets the new one.

    Returns:
        The folder of the new checkpoint.

    Raises:
        ValueError: The latest checkpoint of the folder is another run's, or a state is of objects
            that could not be read back.
    """
    latest = path / "latest"
    if latest.exists() and latest.resolve() not in own:
        raise ValueError(
            f"path is {str(path)!r}, whose latest checkpoint these Jobs neither wrote nor restored,"
            " and a save would replace it: restore it first, save to another folder, or delete it"
        )
    path.mkdir(parents=True, exist_ok=True)
    numbers = [int(each.name[-6:]) for each in _list_numbered(path)]
    folder = path / f"checkpoint-{max(numbers, default=0) + 1:06d}"
    partial = path / f".partial-{os.getpid()}"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    try:
        for job in jobs:
            write_adapter(peft_model, job, partial / job.name)
            _write_state(job, partial / f"{job.name}.pt")
        described = {job.name: describe_job(job) for job in jobs}
        text = json.dumps({"version": _VERSION, **header, "jobs": described}, indent=1)
        (partial / "jobs.json").write_text(text)
        _flush_tree(partial)
        partial.rename(folder)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    own.add(folder.resolve())  # before the link: whatever happens from here on, it is this run's
    _flush(path)
    link = path / f".latest-{os.getpid()}"
    link.unlink(missing_ok=True)
    link.symlink_to(folder.name)
    link.replace(latest)
    _flush(path)
    _remove_others(path, folder)
    return folder


def _write_state(job: TrainingJob, file: Path) -> None:
    """Write the state of a job's optimizer and schedule, as `read_states` can read it.

    Raises:
        ValueError: It has objects that are not loaded as weights are.
    """
    schedule = None if job.schedule is None else job.schedule.state_dict()
    state = {"optimizer": job.optimizer.state_dict(), "schedule": schedule}
    torch.save(_without_numpy(state), file)
    try:
        torch.load(file, weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        raise ValueError(
            f"job {job.name!r}: the state of its optimizer or schedule has objects that "
            "torch.load(weights_only=True) does not read, so it could not be restored: keep "
            f"numbers, texts and tensors in state_dict() ({error})"
        ) from error


def _without_numpy(state: Any) -> Any:
    """Return a state with NumPy's scalars, such as rates of a formula, as numbers of Python."""
    if isinstance(state, np.generic):
        return state.item()
    if type(state) is dict:
        return {_without_numpy(key): _without_numpy(value) for key, value in state.items()}
    if type(state) in (list, tuple):
        return type(state)(map(_without_numpy, state))
    return state


def describe_job(job: TrainingJob) -> dict[str, Any]:
    """Return what of a job is plain data, for JSON."""
    config = json.loads(json.dumps(job.config.to_dict(), default=_to_plain))
    return {
        "settings": asdict(job.settings),
        "config": {key: config[key] for key in config.keys() - _NOT_COMPARED},
        "data": job.data.fingerprint,
        "optimizer": type(job.optimizer).__name__,
        "schedule": None if job.schedule is None else type(job.schedule).__name__,
        "state": job.state,
        "reason": job.reason,
        "num_steps": job.num_steps,
        "num_tokens": job.num_tokens,
        "seconds": job.seconds,
        "losses": job.losses,
    }


def _to_plain(value: Any) -> Any:
    return sorted(value) if isinstance(value, set | frozenset) else str(value)


def fingerprint_base(model: nn.Module) -> str:
    """Return a hash of the base's parameters: names, shapes, and the first 64 numbers of each.

    It is the same while the base has adapters.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            continue
        name = name.replace(".base_layer.", ".")
        digest.update(f"{name}{tuple(parameter.shape)}{parameter.dtype}".encode())
        first = parameter.detach().flatten()[:64].to("cpu", torch.float32)
        digest.update(first.numpy().tobytes())
    return digest.hexdigest()


def read_checkpoint(path: Path, header: dict[str, Any]) -> tuple[Path, dict[str, Any]]:
    """Return the folder of the latest checkpoint and its jobs as they were described.

    Args:
        path: Folder of the checkpoints, or one of them.
        header: Data that has to be as when it was written.

    Raises:
        FileNotFoundError: There is no checkpoint.
        ValueError: It is of another version, base or `Jobs`.
    """
    folder = path if (path / "jobs.json").exists() else path / "latest"
    if not (folder / "jobs.json").exists():
        raise FileNotFoundError(f"{path} has no checkpoint of Jobs (no latest/jobs.json)")
    folder = folder.resolve()
    found = json.loads((folder / "jobs.json").read_text())
    for key, now in {"version": _VERSION, **header}.items():
        if found.get(key) != now:
            raise ValueError(
                f"{path} was saved with {key}={found.get(key)!r}; it is {now!r} now, with which "
                "training would not go on with the same bits"
            )
    return folder, found["jobs"]


def read_states(
    folder: Path, saved: Mapping[str, Any], job: TrainingJob, peft_model: Any
) -> dict[str, Any]:
    """Return the adapter, optimizer and schedule of a job if they are those of the job now.

    Raises:
        ValueError: The job's arguments, data or adapter are others than when it was saved.
    """
    from safetensors.torch import load_file

    now = describe_job(job)
    for key in ("settings", "config", "data", "optimizer", "schedule"):
        if saved[key] != now[key]:
            raise ValueError(
                f"job {job.name!r} has another {key} than in the checkpoint: "
                f"{_first_difference(saved[key], now[key])}; add it as it was"
            )
    adapter = load_file(folder / job.name / "adapter_model.safetensors")
    current = adapter_state(peft_model, job.name)
    if {key: each.shape for key, each in adapter.items()} != {
        key: each.shape for key, each in current.items()
    }:
        raise ValueError(f"job {job.name!r} has another adapter in the checkpoint")
    states = torch.load(folder / f"{job.name}.pt", weights_only=True)
    saved_groups, groups = states["optimizer"]["param_groups"], job.optimizer.param_groups
    if [len(each["params"]) for each in saved_groups] != [len(each["params"]) for each in groups]:
        raise ValueError(f"job {job.name!r}: its optimizer has other groups than in the checkpoint")
    return {"adapter": adapter, **states}


def apply_states(
    states: dict[str, Any], saved: Mapping[str, Any], job: TrainingJob, peft_model: Any
) -> None:
    """Put a job where it was when it was saved."""
    for key, each in adapter_state(peft_model, job.name).items():
        each.copy_(states["adapter"][key])
    job.optimizer.load_state_dict(states["optimizer"])
    if job.schedule is not None:
        job.schedule.load_state_dict(states["schedule"])
    job.state, job.reason = saved["state"], saved["reason"]
    job.num_steps, job.num_tokens = saved["num_steps"], saved["num_tokens"]
    job.seconds, job.losses = saved["seconds"], list(saved["losses"])


def _first_difference(before: Any, now: Any) -> str:
    if isinstance(before, dict) and isinstance(now, dict):
        key = next(k for k in sorted({*before, *now}) if before.get(k) != now.get(k))
        return f"{key} was {before.get(key)!r} and is {now.get(key)!r}"
    return f"{before!r} and {now!r}"


def _list_numbered(path: Path) -> Iterator[Path]:
    """Yield the folders with a checkpoint's name; another library's may be among them."""
    return (p for p in path.glob("checkpoint-*") if re.fullmatch(r"checkpoint-\d{6}", p.name))


def _remove_others(path: Path, folder: Path) -> None:
    for other in list(_list_numbered(path)):
        if other != folder and (other / "jobs.json").exists():
            # Under a name that the next save removes: a folder without jobs.json is left alone.
            other.rename(path / f".partial-{other.name}")
    for partial in path.glob(".partial-*"):
        shutil.rmtree(partial, ignore_errors=True)
    for link in path.glob(".latest-*"):
        link.unlink()


def _flush_tree(folder: Path) -> None:
    for each in sorted(folder.rglob("*"), reverse=True):
        _flush(each)
    _flush(folder)


def _flush(path: Path) -> None:
    """Have a file's bytes, or a folder's names, on the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
