"""What a cluster can never run is refused before the run's folder exists."""

from __future__ import annotations

import shutil
import site
import sys
import venv
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from harness import BABYAI, Ludus

import ludus as package

pytest.importorskip("ray", reason="needs the extra ray")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    from ray.cluster_utils import Cluster

    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 2})
    yield cluster
    cluster.shutdown()


def refused(ludus: Ludus, cluster: Any, text: str, *args: str) -> None:
    address = f"backend.args.address={cluster.address}"
    done = ludus("train", BABYAI, "backend.name=ray", address, *args)
    done.refused(2, text)
    assert not (ludus.cwd / "runs").exists()


def python_without_ludus(folder: Path) -> Path:
    """Returns a Python that has this one's packages, but nothing that is installed as editable."""
    venv.create(folder, with_pip=False)
    own = next(folder.glob("lib/python*/site-packages"))
    (own / "packages.pth").write_text("\n".join(site.getsitepackages()))
    return folder / "bin" / "python"


def add_node(cluster: Any, python: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A node whose processes are of another Python."""
    with monkeypatch.context() as patch:
        patch.setattr(sys, "executable", str(python))
        cluster.add_node(num_cpus=1)


def test_actors_for_which_there_is_no_room(ludus: Ludus, cluster: Any) -> None:
    text = "learner_ranks = 1, samplers = 4, env_workers = 0 need 5 CPUs, and the cluster has 2"
    refused(ludus, cluster, text, "backend.args.samplers=4")


@pytest.mark.parametrize(
    ("env", "text"),
    [
        ({"RAY_AUTH_MODE": "disabled"}, "If it asks for a token, set RAY_AUTH_MODE=token"),
        ({"RAY_AUTH_TOKEN": "a" * 64}, "or set RAY_AUTH_TOKEN"),
        ({"RAY_AUTH_TOKEN_PATH": "/no/file"}, "cannot be opened or is empty: /no/file"),
    ],
)
def test_another_token_than_the_clusters(
    ludus: Ludus, cluster: Any, env: dict[str, str], text: str
) -> None:
    address = f"backend.args.address={cluster.address}"
    ludus("train", BABYAI, "backend.name=ray", address, env=env).refused(2, text)


def test_gpus_that_this_machine_lacks(ludus: Ludus) -> None:
    import torch

    count = torch.cuda.device_count()
    args = ["backend.name=ray", "model.device=cuda", f"backend.args.samplers={count + 1}"]
    done = ludus("train", BABYAI, *args)
    done.refused(2, f"need {count + 2} GPUs, and this machine has {count}: 2 GPUs are missing")
    assert not (ludus.cwd / "runs").exists()


def test_nodes_with_other_packages(
    ludus: Ludus, cluster: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    python = python_without_ludus(tmp_path / "venv")
    add_node(cluster, python, monkeypatch)
    refused(ludus, cluster, "a node of the cluster lacks ludus")
    own = next((tmp_path / "venv").glob("lib/python*/site-packages"))
    shutil.copytree(Path(package.__file__).parent, own / "ludus")
    source = own / "ludus" / "__init__.py"
    source.write_text(source.read_text().replace(package.__version__, "0.0.9"))
    refused(ludus, cluster, "has ludus 0.0.9")
