"""deploy/kuberay/, the Prometheus configuration, the Grafana dashboard, the keys in the docs."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import yaml

import ludus
from ludus.cluster.hosts import ClusterConfig, HostConfig, SshConfig
from ludus.config.load import load_config

ROOT = Path(ludus.__file__).parents[1]
DEPLOY = ROOT / "deploy"
DASHBOARD = json.loads((DEPLOY / "grafana" / "ludus.json").read_text(encoding="utf-8"))
QUANTITY = re.compile(r"^\d+(\.\d+)?(m|[kMGTP]i?)?$")


def documents(name: str) -> list[dict[str, Any]]:
    text = (DEPLOY / "kuberay" / name).read_text(encoding="utf-8")
    return list(yaml.safe_load_all(text))


[CLUSTER] = documents("raycluster.yaml")
[JOB] = documents("rayjob.yaml")
[CLAIM] = documents("storage.yaml")
SERVICES = documents("services.yaml")


def pods() -> Iterator[tuple[str, dict[str, Any]]]:
    spec = CLUSTER["spec"]
    yield "head", spec["headGroupSpec"]["template"]["spec"]
    for group in spec["workerGroupSpecs"]:
        yield group["groupName"], group["template"]["spec"]


def test_kinds_and_versions() -> None:
    kinds = [(one["apiVersion"], one["kind"]) for one in (CLUSTER, JOB, CLAIM, *SERVICES)]
    ray, core = "ray.io/v1", "v1"
    expected = [(ray, "RayCluster"), (ray, "RayJob"), (core, "PersistentVolumeClaim")]
    assert kinds == [*expected, (core, "Service"), (core, "Service")]
    pinned = re.search(r"^ray==(\S+)", (ROOT / "constraints.txt").read_text(), re.M)
    assert pinned is not None
    assert CLUSTER["spec"]["rayVersion"] == pinned[1], "the image installs this version"
    assert CLUSTER["spec"]["authOptions"] == {"mode": "token"}


def test_pods_mount_what_exists() -> None:
    images = {container["image"] for _, pod in pods() for container in pod["containers"]}
    assert len(images) == 1
    for name, pod in pods():
        [container] = pod["containers"]
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert {mount["name"] for mount in container["volumeMounts"]} == set(volumes), name
        claim = volumes["runs"]["persistentVolumeClaim"]["claimName"]
        assert claim == CLAIM["metadata"]["name"]
        places = {mount["name"]: mount["mountPath"] for mount in container["volumeMounts"]}
        variables = {one["name"]: one["value"] for one in container["env"]}
        assert variables["LUDUS_RUNS_DIR"] == places["runs"]
        assert all(isinstance(value, str) for value in variables.values())
        for kind in ("requests", "limits"):
            for size in container["resources"][kind].values():
                assert QUANTITY.match(str(size)), size
        assert pod["securityContext"]["runAsUser"] == 10001, "the image's user"
    assert CLAIM["spec"]["accessModes"] == ["ReadWriteMany"], "several pods write"


def test_services_select_the_cluster_and_its_ports() -> None:
    [head] = dict(pods())["head"]["containers"]
    named = {port["name"]: port["containerPort"] for port in head["ports"]}
    for service in SERVICES:
        assert service["spec"]["selector"]["ray.io/cluster"] == CLUSTER["metadata"]["name"]
        for port in service["spec"]["ports"]:
            target = port["targetPort"]
            assert (named[target] if isinstance(target, str) else target) == port["port"]


def test_the_job_is_a_run() -> None:
    assert JOB["spec"]["clusterSelector"] == {"ray.io/cluster": CLUSTER["metadata"]["name"]}
    python, option, module, recipe, *overrides = shlex.split(JOB["spec"]["entrypoint"])
    assert (python, option) == ("python", "-m")
    assert find_spec(module) is not None
    assert load_config(recipe, overrides).name
    variables = yaml.safe_load(JOB["spec"]["runtimeEnvYAML"])["env_vars"]
    assert all(isinstance(value, str) for value in variables.values())
    assert variables["LUDUS_RAY_NAMESPACE"] == JOB["metadata"]["name"]


# Metrics


def expressions() -> list[str]:
    panels = [panel for panel in DASHBOARD["panels"] if panel["type"] != "row"]
    assert len(panels) > 20
    return [target["expr"] for panel in panels for target in panel["targets"]]


def names(prefix: str) -> set[str]:
    """The metrics of the dashboard that begin so."""
    return {name for text in expressions() for name in re.findall(rf"\b{prefix}_\w+", text)}


def exported_by_services() -> set[str]:
    """The names that the services' sources register, with the suffixes of their kinds."""
    suffixes = {"Gauge": [""], "Counter": ["_total"], "Histogram": ["_bucket", "_count", "_sum"]}
    found = set()
    for path in (ROOT / "ludus" / "services").rglob("*.py"):
        text = path.read_text(encoding="utf-8")
        for kind, name in re.findall(r'(Gauge|Counter|Histogram)\(\s*f?"(ludus_[\w{}]+)"', text):
            if "{name}" in name:  # several gauges of one loop
                rows = re.findall(r'^\s+\("(\w+)", "', text, re.M)
                found |= {name.replace("{name}", row) for row in rows}
            found |= {name + suffix for suffix in suffixes[kind]}
    return found


def documented_metrics() -> set[str]:
    """The sink's names for the metrics in docs/metrics.md and docs/profiling.md."""
    text = "".join((ROOT / "docs" / page).read_text() for page in ("metrics.md", "profiling.md"))
    found = re.findall(r"`([a-z]+/[\w]+)`", text)
    return {"ludus_step", *("ludus_" + name.replace("/", "_") for name in found)}


def test_every_metric_of_the_dashboard_is_exported() -> None:
    unknown = names("ludus") - documented_metrics() - exported_by_services()
    assert not unknown
    assert names("ludus") & exported_by_services()


def test_every_metric_of_ray_is_one_of_its_own_dashboards() -> None:
    """GPUs' metrics are exported on machines that have one; Ray's own dashboard names them."""
    ray = find_spec("ray")
    if ray is None or ray.origin is None:
        pytest.skip("needs the extra ray")
    panels = Path(ray.origin).parent / "dashboard" / "modules" / "metrics" / "dashboards"
    text = "".join(path.read_text() for path in panels.glob("*_panels.py"))
    known = set(re.findall(r"\bray_\w+", text))
    assert names("ray") <= known, names("ray") - known


@pytest.mark.slow
def test_a_run_exports_the_metrics_of_the_dashboard(ludus: Any) -> None:
    ludus("train", ROOT / "tests" / "recipes" / "babyai.yaml").ok()
    measured = {name for line in ludus.metrics() for name in line}
    exported = {"ludus_step", *("ludus_" + name.replace("/", "_") for name in measured)}
    assert names("ludus") - exported_by_services() <= exported


def test_the_dashboard_is_one_that_grafana_reads() -> None:
    assert DASHBOARD["uid"] == "ludus"
    variables = [one["name"] for one in DASHBOARD["templating"]["list"]]
    assert variables == ["datasource", "run"]
    used = {name for text in expressions() for name in re.findall(r"\$(\w+)", text)}
    assert used <= set(variables)
    ids = [panel["id"] for panel in DASHBOARD["panels"]]
    assert len(ids) == len(set(ids))
    for panel in DASHBOARD["panels"]:
        place = panel["gridPos"]
        assert 0 <= place["x"] < place["x"] + place["w"] <= 24


def test_prometheus_scrapes_the_ports_that_are_served() -> None:
    from ludus.telemetry.sinks.prometheus import Prometheus

    content = yaml.safe_load((DEPLOY / "prometheus.yml").read_text(encoding="utf-8"))
    jobs = {job["job_name"]: job for job in content["scrape_configs"]}
    [files] = jobs["ray"]["file_sd_configs"][0]["files"]
    logs = ClusterConfig.model_validate({"head": "10.0.0.1"}).logs
    assert files == f"{logs}/prom_metrics_service_discovery.json"
    assert Prometheus.__init__.__defaults__ is not None
    port = Prometheus.__init__.__defaults__[0]
    assert jobs["ludus-runs"]["static_configs"][0]["targets"] == [f"127.0.0.1:{port}"]


# The page


def test_every_key_of_hosts_is_documented() -> None:
    page = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
    for section in (ClusterConfig, HostConfig, SshConfig):
        for key in section.model_fields:
            assert f"`{key}`" in page, f"{section.__name__}.{key}"


def test_the_page_shows_a_file_that_is_valid() -> None:
    page = (ROOT / "docs" / "cluster.md").read_text(encoding="utf-8")
    for text in re.findall(r"^```yaml\n(.*?)^```", page, re.M | re.S):
        assert ClusterConfig.model_validate(yaml.safe_load(text)).head
