"""moespac models and moespac pull: the pairs that have a name, and their files."""

from __future__ import annotations

import os
import sys
from dataclasses import dataclass
from json import dumps
from pathlib import Path
from typing import Annotated, Any

import typer

from moespac_llamacpp.catalog import CatalogError, Entry, HubFile, bundled_catalog, find, read_catalog
from moespac_llamacpp.commands.shared import fail, find_device, progress
from moespac_llamacpp.models import capture_log
from moespac_llamacpp.plan import RESERVE, Place
from moespac_llamacpp.planner import place_of

#: A file of more pairs, in the form of models.txt; they come first.
OWN_CATALOG = "MOESPAC_MODELS"
#: Host memory beside the weights: KV and buffers that are not on the device, Python, the desktop.
HOST_MARGIN = 2 * 10**9


def catalog() -> list[Entry]:
    """CatalogError."""
    own = os.environ.get(OWN_CATALOG)
    entries = read_catalog(Path(own)) if own else []
    names = {entry.name for entry in entries}
    return entries + [entry for entry in read_catalog(bundled_catalog()) if entry.name not in names]


@dataclass(frozen=True)
class Resolved:
    """What was given as a model: a file, or a name and its files."""

    target: Path
    draft: Path | None = None
    named: bool = False


def resolve(model: Path) -> Resolved:
    """typer.Exit after a sentence: no such file and no such name, or it is not fetched yet."""
    if model.exists() or model.suffix == ".gguf" or len(model.parts) > 1:
        return Resolved(model)
    from moespac_llamacpp.fetch import local

    try:
        entry = find(catalog(), str(model))
    except CatalogError as error:
        raise fail(f"{model}: neither a file nor a known model: {error}") from error
    target, draft = local(entry.target), local(entry.draft) if entry.draft else None
    if target is None or (entry.draft and draft is None):
        raise fail(f"{entry.name} is not fetched yet: `moespac pull {entry.name}` ({entry.gigabytes})")
    return Resolved(target, draft, named=True)


def lacks(entry: Entry, place: Place, free_disk: int | None) -> list[str]:
    """What this machine lacks for a pair, one phrase each. free_disk: bytes for it, None if it is there already."""
    found = []
    if free_disk is not None and (more := entry.bytes - free_disk) > 0:
        found.append(f"{more / 1e9:.1f} GB more disk")
    if place.host_total and (more := entry.target_bytes + HOST_MARGIN - place.host_total) > 0:
        found.append(f"{more / 1e9:.1f} GB more memory")
    if place.gpu and (more := entry.vram + RESERVE - place.total) > 0:
        found.append(f"{more / 1e9:.1f} GB more VRAM, or a smaller context")
    return found


def models_command(
    device: Annotated[str | None, typer.Option("--device", help="Name of the device for slots (see doctor).")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """The models that have a name, and whether they fit this machine."""
    from moespac_llamacpp.fetch import free_disk, local

    capture_log()
    try:
        entries = catalog()
    except CatalogError as error:
        raise fail(error) from error
    place = place_of(find_device(device))
    records: list[dict[str, Any]] = []
    for entry in entries:
        files = [file for file in (entry.target, entry.draft) if file]
        there = all(local(file) is not None for file in files)
        records.append({
            "name": entry.name, "target": str(entry.target), "draft": str(entry.draft) if entry.draft else None,
            "bytes": entry.bytes, "approximate": entry.approximate, "licence": entry.licence, "vram": entry.vram,
            "fetched": there, "lacks": lacks(entry, place, None if there else free_disk()),
        })  # fmt: skip
    if json:
        typer.echo(dumps(records, indent=1))
        return
    vram = f"{place.total / 1e9:.1f} GB on {place.name}" if place.gpu else "no GPU"
    typer.echo(f"this machine: {place.host_total / 1e9:.1f} GB of memory, {vram}")
    for entry, record in zip(entries, records, strict=True):
        draft = entry.draft.name.removesuffix(".gguf") if entry.draft else "n-gram lookup"
        state = "needs " + " and ".join(record["lacks"]) if record["lacks"] else "fits"
        typer.echo(
            f"{entry.name:24s} {entry.gigabytes:>9s}  {entry.licence:11s} {state}{', fetched' if record['fetched'] else ''}; "
            f"draft: {draft}; --vram {entry.vram / 2**30:g}G to start with"
        )


def pull_command(
    name: Annotated[str, typer.Argument(help="A name of `moespac models`, or owner/repository/file.gguf on the hub.")],
    check: Annotated[bool, typer.Option("--verify", help="Also check files that were there already.")] = False,
) -> None:
    """Fetch a model, all its parts and its draft, into the cache of the Hugging Face hub; goes on where it ended."""
    try:
        if "/" in name:
            files = [HubFile.parse(name)]
        else:
            entry = find(catalog(), name)
            files = [file for file in (entry.target, entry.draft) if file]
    except (CatalogError, ValueError) as error:
        raise fail(error) from error
    paths = [pull(file, check) for file in files]
    typer.echo("\n".join(map(str, paths)))


def pull(file: HubFile, check: bool = False) -> Path:
    """Fetches and verifies all parts; the path of the first."""
    from huggingface_hub.utils.tqdm import disable_progress_bars

    from moespac_llamacpp.fetch import FetchError, fetch, local, verify

    if not sys.stderr.isatty():
        disable_progress_bars()
    paths = []
    for i, name in enumerate(file.parts, 1):
        there = local(HubFile(file.repo, name)) is not None
        part = f" (part {i} of {len(file.parts)})" if len(file.parts) > 1 else ""
        typer.echo(f"{'there already' if there else 'fetching'}: {file.repo}/{name}{part}", err=True)
        try:
            paths.append(fetch(file, name))
            if not there or check:
                with progress(f"checking {Path(name).name}") as report:
                    known = verify(paths[-1], report)
                typer.echo("checksum: " + ("good" if known else "none is known"), err=True)
        except FetchError as error:
            raise fail(error) from error
    return paths[0]
