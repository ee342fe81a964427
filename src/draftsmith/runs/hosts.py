"""The hosts file: names for places where runs live, besides this machine."""

from pathlib import Path

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from draftsmith.errors import UsageError
from draftsmith.runs.transport import Host

HOSTS_FILE = Path("~/.config/draftsmith/hosts.yaml")


class HostSection(BaseModel):
    """One host. ssh: destination; wrapper: command that runs its arguments inside; python and folder: there."""

    model_config = ConfigDict(extra="forbid")

    ssh: str | None = None
    wrapper: list[str] = []
    python: str = "python3"
    folder: str | None = None


def find_host(name: str, file: Path | None = None) -> Host:
    """The host called `name`; `local` is this machine. Raises UsageError for a name or a file that will not do."""
    if name == "local":
        return Host()
    path = (file or HOSTS_FILE).expanduser()
    try:
        known = yaml.safe_load(path.read_text(encoding="utf-8")) or {}
    except FileNotFoundError:
        raise UsageError(f"host '{name}' is not known: there is no {path}; write one with a section for it") from None
    except (OSError, yaml.YAMLError) as error:
        raise UsageError(f"{path} cannot be read as YAML: {' '.join(str(error).split())}") from error
    if not isinstance(known, dict) or name not in known:
        names = ", ".join(sorted(map(str, known))) if isinstance(known, dict) else "none"
        raise UsageError(f"host '{name}' is not in {path}, which knows: {names}")
    try:
        section = HostSection.model_validate(known[name])
    except ValidationError as error:
        first = error.errors()[0]
        raise UsageError(f"{path}: {name}.{'.'.join(map(str, first['loc']))}: {first['msg']}") from error
    if section.ssh is not None and section.ssh.startswith("-"):
        raise UsageError(f"{path}: {name}.ssh is '{section.ssh}', which ssh would take for an option; give a destination")
    return Host(name, section.ssh, tuple(section.wrapper), section.python, section.folder)
