"""How fast this machine moves and reads weights: measured once by `moespac doctor`, kept as JSON, used by `moespac plan`."""

from __future__ import annotations

import json
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path

from moespac_llamacpp.machine import cache_folder

#: n of m threads read (n / m) ** FEWER of what m do: 8 of 16 read 0.61 on an H200's Xeon in one session, 0.79 of 15 in another.
FEWER = 0.75


@dataclass(frozen=True)
class Profile:
    """Bytes a second. link: page-locked host memory to the device; pageable: other host memory; 0 where there is none."""

    device: str
    cpu: str
    threads: int
    cpu_read: float  # all threads together, from DRAM
    link: float
    pageable: float
    device_read: float
    measured: str  # date

    def with_threads(self, n: int) -> Profile:
        """What fewer threads would read; more than it was measured with read no more."""
        if n >= self.threads:
            return self
        return replace(self, threads=n, cpu_read=self.cpu_read * (n / self.threads) ** FEWER)

    def describe(self) -> str:
        link = f"link {_rate(self.link)} page-locked, {_rate(self.pageable)} pageable" if self.link else "no link"
        return (
            f"{self.cpu} reads {_rate(self.cpu_read)} with {self.threads} threads; {link}; {self.device} reads "
            f"{_rate(self.device_read)} ({self.measured})"
        )


def _rate(n: float) -> str:
    return f"{n / 1e9:.1f} GB/s"


def path_of(folder: Path, device: str) -> Path:
    return folder / f"profile-{re.sub(r'[^A-Za-z0-9.-]+', '-', device).strip('-')}.json"


def save(profile: Profile, folder: Path) -> Path:
    """Written beside and renamed, so that nobody ever reads half of it. OSError."""
    folder.mkdir(parents=True, exist_ok=True)
    path = path_of(folder, profile.device)
    with tempfile.NamedTemporaryFile("w", dir=folder, prefix=path.name, delete=False) as file:
        json.dump(asdict(profile), file, indent=1)
    os.replace(file.name, path)
    return path


def load(folder: Path, device: str) -> Profile | None:
    """None if there is none, or what is there is no profile: it can be measured again at any time."""
    try:
        found = json.loads(path_of(folder, device).read_text())
        profile = Profile(**{field.name: found[field.name] for field in fields(Profile)})
        numbers = (profile.cpu_read, profile.link, profile.pageable, profile.device_read)
        return (
            profile
            if all(float(n) >= 0 for n in numbers) and profile.cpu_read > 0 and profile.device_read > 0
            else None
        )
    except (OSError, ValueError, KeyError, TypeError):
        return None


def known(device: str, environment: Mapping[str, str], threads: int | None = None) -> Profile | None:
    """What is kept in the user's cache folder; None also where there is none, as without a home. threads: that will compute,
    None for as many as it was measured with."""
    try:
        profile = load(cache_folder(environment), device)
    except FileNotFoundError:
        return None
    return profile.with_threads(threads) if profile and threads else profile
