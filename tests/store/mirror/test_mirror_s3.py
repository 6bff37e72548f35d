"""The mirror on S3's own protocol, spoken by s3fs with a server on this machine."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest
from test_mirror import Machine

from ludus.core.errors import MirrorError
from ludus.store.mirror import MirrorTaken, Remote

pytest.importorskip("s3fs", reason="needs the extra `s3`")
server = pytest.importorskip("moto.server", reason="needs moto[s3], flask and flask-cors")
pytestmark = pytest.mark.skipif(
    "PYTEST_XDIST_WORKER" in os.environ,
    reason="its server hung behind other tests' threads: test_mirror_s3_alone.py runs it apart",
)


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    started = server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    started.start()
    host, port = started.get_host_and_port()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test")
    monkeypatch.setenv("AWS_DEFAULT_REGION", "us-east-1")
    monkeypatch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
    import s3fs

    name = f"runs-{uuid4().hex}"
    s3fs.S3FileSystem(skip_instance_cache=True).mkdir(name)
    yield f"s3://{name}"
    started.stop()


def test_a_run_goes_to_s3_and_comes_back(bucket: str, tmp_path: Path) -> None:
    url = f"{bucket}/some/run"
    first = Machine(tmp_path / "a", url).begin()
    zombie = first.mirror()
    for step in range(4):
        first.work(step)
        zombie.push()
    fresh = Machine(tmp_path / "b", url)
    assert fresh.fetch_run() is not None
    assert fresh.state() == first.state()
    large = [size for size in Remote(url).sizes().values() if size == 1000]
    assert len(large) == 3, "the checkpoints of the newest two snapshots"

    fresh.work(4)
    fresh.mirror().push()
    with pytest.raises(MirrorTaken):
        zombie.push()

    # Put-if-absent is the storage's own: it holds where two look at the same moment.
    remote = Remote(url)
    newest = remote.newest()
    assert newest is not None
    with pytest.raises(FileExistsError):
        remote._fs.pipe_file(remote._snapshot(newest.sequence), b"{}", mode="create")


def test_a_bucket_that_is_not_there(
    bucket: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ludus.store.mirror.sync.time.sleep", lambda _: None)
    first = Machine(tmp_path / "a", "s3://no-such-bucket/run").begin()
    with pytest.raises(MirrorError, match="no-such-bucket"):
        first.mirror().push()
