"""HOSTS.yaml: strict, with all faults at once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from ludus.cluster.hosts import HostConfig, is_here, load_hosts
from ludus.core.errors import ConfigError


def written(folder: Path, content: Any) -> str:
    path = folder / "hosts.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    return str(path)


def test_a_text_is_the_address_of_a_host(tmp_path: Path) -> None:
    content = {"head": "10.0.0.1", "workers": ["10.0.0.2", {"address": "10.0.0.3", "gpus": 8}]}
    config = load_hosts(written(tmp_path, content))
    assert [host.address for host in config.hosts] == ["10.0.0.1", "10.0.0.2", "10.0.0.3"]
    assert config.workers[1].gpus == 8
    assert config.url == "http://127.0.0.1:8265"


def test_the_dashboard_of_all_interfaces_is_at_the_head(tmp_path: Path) -> None:
    content = {"head": "10.0.0.1", "dashboard": {"host": "0.0.0.0", "port": 9000}}
    assert load_hosts(written(tmp_path, content)).url == "http://10.0.0.1:9000"


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ({"head": "10.0.0.1", "wokers": []}, "wokers is not a key (did you mean workers?)"),
        ({"head": {"addres": "10.0.0.1"}}, "head.addres is not a key (did you mean head.address?)"),
        ({"workers": ["10.0.0.1"]}, "head is required"),
        ({"head": "10.0.0.1", "workers": ["10.0.0.1"]}, "the address 10.0.0.1 is named twice"),
        (
            {"head": "10.0.0.1", "workers": ["-oProxyCommand=x"]},
            "workers.0.address: must be an IPv4 address",
        ),
        ({"head": "gpu1"}, "head.address: must be an IPv4 address, got 'gpu1'"),
        ({"head": {"address": "10.0.0.1", "ssh": "-x"}}, "head.ssh must be text"),
        ({"head": "10.0.0.1", "ssh": {"user": "-x"}}, "ssh.user must be text"),
        ({"head": "127.0.0.1", "workers": ["10.0.0.2"]}, "10.0.0.2 cannot reach 127.0.0.1"),
        ({"head": "10.0.0.1", "port": 10500}, "must not be in 10001 to 19999"),
        ({"head": "10.0.0.1", "port": 8265}, "`port` and `dashboard.port` must differ"),
        ({"head": "10.0.0.1", "logs": "logs"}, "`logs` must be an absolute path"),
        ({"head": "10.0.0.1", "logs": "/" + 50 * "x"}, "`logs` must have at most 40 characters"),
        ({"head": "10.0.0.1", "runs": "runs"}, "`runs` must be an absolute path"),
        ({"head": "10.0.0.1", "env": {"A-B": "x"}}, "'A-B' is no name of an environment variable"),
        ({"head": "10.0.0.1", "env": {"RAY_AUTH_MODE": "x"}}, "RAY_AUTH_MODE is set by `auth`"),
        ({"head": "10.0.0.1", "env": {"A": 1}}, "env.A must be text, got 1"),
        ({"head": "10.0.0.1", "auth": "none"}, "auth must be one of token, disabled"),
        ("", "the file is empty: it needs at least `head`"),
        ("# head\n", "the file is empty: it needs at least `head`"),
        ({"head": 5}, "head: must be an IPv4 address, or a mapping of a host's keys, got 5"),
        ({"head": "0.0.0.0"}, "0.0.0.0 is no address of a host"),
        ({"head": "224.0.0.1"}, "224.0.0.1 is no address of a host"),
        ({"head": "255.255.255.255"}, "255.255.255.255 is no address of a host"),
        ({"head": {"address": "10.0.0.1", "memory_gb": 1e300}}, "head.memory_gb must be a number"),
        ({"head": {"address": "10.0.0.1", "memory_gb": 1e-9}}, "head.memory_gb must be a number"),
        ({"head": {"address": "10.0.0.1", "resources": {"a": -1}}}, "head.resources.a must be"),
        ({"head": {"address": "10.0.0.1", "resources": {"GPU": 4}}}, "GPU is Ray's own: set"),
        ({"head": {"address": "10.0.0.1", "resources": {"": 4}}}, "'' is no name of a resource"),
        ({"head": "10.0.0.1", "ssh": {"options": [""]}}, "ssh.options.0 must be text that matches"),
        ({"head": "10.0.0.1", "ssh": {"options": ["A=b\nC=d"]}}, "ssh.options.0 must be text"),
        ({"head": "10.0.0.1", "env": {"A": "a\0"}}, "env.A: must be text without NUL"),
        ({"head": "10.0.0.1", "env": {"\u00e4": "x"}}, "is no name of an environment variable"),
        ({"head": "10.0.0.1", "env": {"LUDUS_CLUSTER": "x"}}, "LUDUS_CLUSTER is set by `name`"),
        ({"head": "10.0.0.1", "env": {"UID": "0"}}, "UID is bash's own"),
        ({"head": "10.0.0.1", "logs": "/" + 30 * "\u00e9"}, "`logs` must have at most 40"),
        ({"head": "10.0.0.1", "logs": "/a\nb"}, "logs: must be text on one line"),
        ({"head": "10.0.0.1", "runs": "/a\0b"}, "runs: must be text on one line"),
        ({"head": "10.0.0.1", "python": "-c"}, "python: must be the path of Python"),
        ({"head": "10.0.0.1", "python": "  "}, "python: must be the path of Python"),
        ({"head": "10.0.0.1", "setup": [" "]}, "setup.0 must be text that matches"),
        ({"head": "10.0.0.1", "name": 200 * "x"}, "name must be text"),
        ("head: [", "hosts.yaml"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path: Path, content: Any, said: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_hosts(written(tmp_path, content))
    assert said in str(refused.value)


def test_all_faults_are_told_together(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as refused:
        load_hosts(written(tmp_path, "head: 10.0.0.1\nprot: 1\nstart_s: 1\n"))
    first, second = str(refused.value).splitlines()
    assert "[line 2]" in second
    assert "start_s must be a whole number >= 5" in first


@pytest.mark.parametrize("name", ["absent.yaml", "."])
def test_a_path_without_hosts_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(ConfigError, match=r"give the file that names the cluster's hosts"):
        load_hosts(str(tmp_path / name))


@pytest.mark.parametrize(
    ("host", "here"),
    [
        ({"address": "127.0.0.1"}, True),
        ({"address": "127.0.0.1", "ssh": "me"}, False),
        ({"address": "192.0.2.77"}, False),
    ],
)
def test_a_host_on_this_machine_needs_no_ssh(host: dict[str, Any], here: bool) -> None:
    assert is_here(HostConfig.model_validate(host)) is here
