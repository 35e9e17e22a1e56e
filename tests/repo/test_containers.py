"""The Dockerfile and compose.yaml name files, targets and commands that exist; building an image would take many minutes."""

from __future__ import annotations

import re
from pathlib import Path

import yaml

from mgrpo.cli import COMMANDS

ROOT = Path(__file__).parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
SERVICES = yaml.safe_load((ROOT / "compose.yaml").read_text())["services"]


def test_what_the_image_copies_is_sent_to_the_builder():
    """.dockerignore leaves everything out that it does not name."""
    copied = {
        name
        for line in re.findall(r"^COPY (?!--from)(?:--\S+ )*(.+)$", DOCKERFILE, re.MULTILINE)
        for name in line.split()[:-1]
    }
    sent = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert copied == sent
    assert all((ROOT / name).exists() for name in sent)


def test_services_run_commands_and_targets_that_exist():
    """A renamed command would be noticed by the first user of the image."""
    targets = set(re.findall(r"^FROM \S+ AS (\S+)$", DOCKERFILE, re.MULTILINE))
    for name, service in SERVICES.items():
        assert service["command"][0] in ("train", *COMMANDS), name
        assert re.findall(r":-(\w+)", service["image"])[0] in targets
    assert (ROOT / re.findall(r":-(.+)}", SERVICES["train"]["command"][-1])[0]).exists()


def test_ports_are_published_on_loopback():
    """What a service shows is not meant for the network; docker publishes on all interfaces and opens the firewall."""
    ports = [port for service in SERVICES.values() for port in service.get("ports", ())]
    assert ports and all(port.startswith("127.0.0.1:") for port in ports)
