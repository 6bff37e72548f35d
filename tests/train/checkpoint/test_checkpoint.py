from __future__ import annotations

import errno
import json
import logging
import os
import random
import re
import resource
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.numpy import load_file
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from ludus.core.errors import CheckpointError, ConfigError
from ludus.core.files import recover
from ludus.store.folders import RunFolder, create_run
from ludus.train.checkpoint import listing, manifest
from ludus.train.checkpoint import store as checkpoint
from ludus.train.checkpoint.folder import checkpoint_folder
from ludus.train.checkpoint.listing import check, checkpoint_folders
from ludus.train.checkpoint.loading import load, read_state
from ludus.train.checkpoint.policy import find_checkpoint
from ludus.train.checkpoint.state import fingerprint, random_state, set_random_state
from ludus.train.checkpoint.store import CheckpointStore

# peft asks transformers for an attribute by its former name.
pytestmark = pytest.mark.filterwarnings("ignore:.is_gradient_checkpointing:FutureWarning")


def qwen3(seed: int = 0, *, tied: bool = True, hidden: int = 16) -> Qwen3ForCausalLM:
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=50,
            hidden_size=hidden,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            head_dim=8,
            tie_word_embeddings=tied,
        )
    )


def lora(model: nn.Module, seed: int = 0) -> Any:
    torch.manual_seed(seed)
    return get_peft_model(
        model, LoraConfig(r=2, target_modules="all-linear", task_type="CAUSAL_LM")
    )


def adamw(model: nn.Module) -> torch.optim.AdamW:
    matrices = [p for p in model.parameters() if p.requires_grad and p.ndim >= 2]
    vectors = [p for p in model.parameters() if p.requires_grad and p.ndim < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors}]
    return torch.optim.AdamW([g for g in groups if g["params"]], lr=1e-2, betas=(0.9, 0.95))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int) -> None:
    """Steps on data that the global generator draws, so its state matters too."""
    for _ in range(num_steps):
        ids = torch.randint(0, 50, (2, 8))
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()


def weights(model: nn.Module) -> dict[str, Tensor]:
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def assert_same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
    assert a.keys() == b.keys()
    assert all(torch.equal(a[name], b[name]) for name in a)


def small() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(8, 8)


def names_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


# --- what is saved and restored ----------------------------------------------------------------


@pytest.mark.parametrize("kind", ["tied", "untied", "lora"])
def test_resumed_training_is_bit_identical(tmp_path: Path, kind: str) -> None:
    def build(seed: int) -> Any:
        if kind == "lora":
            return lora(qwen3(0), seed)
        return qwen3(seed, tied=kind == "tied")

    model = build(1)
    optimizer = adamw(model)
    schedule = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, 1.0, 10)
    train(model, optimizer, 5)
    schedule.step()
    path = CheckpointStore(tmp_path).save(
        "rl", 5, model=model, optimizer=optimizer, state={"random": random_state()}
    )
    train(model, optimizer, 5)

    resumed = build(2)
    resumed_optimizer = adamw(resumed)
    state = load(path, model=resumed, optimizer=resumed_optimizer)
    set_random_state(state["random"])
    train(resumed, resumed_optimizer, 5)

    assert_same(weights(model), weights(resumed))
    before, after = optimizer.state_dict(), resumed_optimizer.state_dict()
    assert before["param_groups"] == after["param_groups"]
    for index, moments in before["state"].items():
        assert_same(moments, after["state"][index])
    assert fingerprint(model) == fingerprint(resumed)


def test_without_its_optimizer_training_would_differ(tmp_path: Path) -> None:
    model = qwen3()
    optimizer = adamw(model)
    train(model, optimizer, 3)
    drawn = random_state()
    path = CheckpointStore(tmp_path).save("rl", 3, model=model, optimizer=optimizer, state={})
    train(model, optimizer, 2)
    other = qwen3(1)
    load(path, model=other)
    set_random_state(drawn)
    train(other, adamw(other), 2)
    assert fingerprint(other) != fingerprint(model)


def test_weights_are_loaded_in_place(tmp_path: Path) -> None:
    path = CheckpointStore(tmp_path).save("sft", 1, model=qwen3(0), state={})
    model = qwen3(1)
    places = [parameter.data_ptr() for parameter in model.parameters()]
    load(path, model=model)
    assert [parameter.data_ptr() for parameter in model.parameters()] == places
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert_same(weights(model), weights(qwen3(0)))


def test_lora_saves_adapters_only_and_knows_its_base(tmp_path: Path) -> None:
    model = lora(qwen3(0))
    train(model, adamw(model), 2)
    path = CheckpointStore(tmp_path).save("rl", 1, model=model, state={})
    assert all("lora_" in name for name in load_file(path / "model.safetensors"))

    same_base = lora(qwen3(0), seed=5)
    load(path, model=same_base)
    assert_same(weights(model), weights(same_base))

    other_base = lora(qwen3(1))
    before = weights(other_base)
    with pytest.raises(CheckpointError, match="another base model"):
        load(path, model=other_base)
    assert_same(before, weights(other_base))


def test_a_frozen_model_still_loads_what_was_trained(tmp_path: Path) -> None:
    path = CheckpointStore(tmp_path).save("rl", 1, model=qwen3(0), state={})
    model = qwen3(1).requires_grad_(False)
    load(path, model=model)
    assert fingerprint(model) == fingerprint(qwen3(0))


def test_buffers_are_saved(tmp_path: Path) -> None:
    model, other = nn.BatchNorm1d(4), nn.BatchNorm1d(4)
    model(torch.randn(16, 4))
    load(CheckpointStore(tmp_path).save("sft", 1, model=model, state={}), model=other)
    assert_same(weights(model), weights(other))
    assert int(other.num_batches_tracked) == 1


def test_fp32_moments_of_bf16_weights_stay_exact(tmp_path: Path) -> None:
    model = small().bfloat16()
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 8, dtype=torch.bfloat16)).sum().backward()
    optimizer.step()
    exact = torch.randn(8, 8)
    optimizer.state[model.weight]["exp_avg"] = exact.clone()
    path = CheckpointStore(tmp_path).save("rl", 1, model=model, optimizer=optimizer, state={})
    again = torch.optim.AdamW(model.parameters())
    load(path, model=model, optimizer=again)
    assert torch.equal(again.state[model.weight]["exp_avg"], exact)
    assert again.state[model.bias]["exp_avg"].dtype == torch.bfloat16


def test_state_returns_as_it_was(tmp_path: Path) -> None:
    state = {"step": 3, "x": 0.1 + 0.2, "big": 2**70, "list": [1, None, True, "ä"], "d": {"e": {}}}
    path = CheckpointStore(tmp_path).save("rl", 3, model=small(), state=state)
    assert load(path, model=small()) == state == read_state(path)


@pytest.mark.parametrize(
    ("state", "place"),
    [
        ({"a": {1: 2}}, "state.a: the key 1"),
        ({"a": [0, torch.zeros(1)]}, r"state.a\[1\] is of type Tensor"),
        ({"a": np.int64(3)}, "state.a is of type int64"),
    ],
)
def test_state_that_json_would_change_is_refused(
    tmp_path: Path, state: dict[str, Any], place: str
) -> None:
    with pytest.raises(CheckpointError, match=place):
        CheckpointStore(tmp_path).save("rl", 1, model=small(), state=state)
    assert names_in(tmp_path) == []


def test_random_state_of_all_generators_returns() -> None:
    torch.manual_seed(1)
    random.gauss(0, 1)
    np.random.standard_normal()
    state = json.loads(json.dumps(random_state()))

    def draw() -> list[float]:
        return [random.gauss(0, 1), random.random(), np.random.standard_normal(), *torch.rand(3)]

    first, second = draw(), draw()
    set_random_state(state)
    assert draw() == first
    assert second != first
    with pytest.raises(CheckpointError, match="CUDA devices"):
        set_random_state({**state, "cuda": [""] * 64})


def test_no_file_needs_pickle(tmp_path: Path) -> None:
    model = qwen3()
    optimizer = adamw(model)
    train(model, optimizer, 1)
    path = CheckpointStore(tmp_path).save("rl", 1, model=model, optimizer=optimizer, state={})
    tensors = {name: load_file(path / name) for name in names_in(path) if "safetensors" in name}
    texts = [json.loads((path / name).read_text()) for name in names_in(path) if "json" in name]
    assert len(tensors) + len(texts) == len(names_in(path)) == 5
    step = tensors["optimizer.safetensors"]["model.embed_tokens.weight/step"]
    assert step == 1.0


def test_fingerprint_follows_content_alone() -> None:
    model = qwen3(0)
    assert fingerprint(model) == fingerprint(qwen3(0)) != fingerprint(qwen3(1))
    before = fingerprint(model)
    with torch.no_grad():
        model.model.norm.weight[0] = torch.nextafter(model.model.norm.weight[0], torch.tensor(9.0))
    assert fingerprint(model) != before

    def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> str:
        return fingerprint(nn.ParameterList([nn.Parameter(torch.zeros(shape, dtype=dtype))]))

    assert len({zeros(2, 3), zeros(3, 2), zeros(6), zeros(12, dtype=torch.bfloat16)}) == 4


def test_fingerprint_of_a_large_model_does_not_depend_on_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = qwen3()
    before = fingerprint(model)
    monkeypatch.setattr("ludus.train.checkpoint.state._MIN_BYTES_FOR_THREADS", 0)
    assert fingerprint(model) == before


# --- another model, another optimizer ----------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "message"),
    [
        (lambda: qwen3(hidden=24), r"embed_tokens.weight: float32\[50, 16\] in the checkpoint"),
        (lambda: qwen3(tied=False), r"lm_head.weight: absent in the checkpoint, float32"),
        (lambda: qwen3().bfloat16(), r"bfloat16\[50, 16\] in the model.*and \d+ more"),
        (lambda: lora(qwen3()), r"absent in the model"),
    ],
)
def test_a_checkpoint_of_another_model_is_refused(tmp_path: Path, model: Any, message: str) -> None:
    path = CheckpointStore(tmp_path).save("rl", 1, model=qwen3(7), state={})
    other = model()
    before = weights(other)
    with pytest.raises(CheckpointError, match="checkpoint of another model: .*" + message):
        load(path, model=other)
    assert_same(before, weights(other))


def test_another_class_with_the_same_tensors_is_refused(tmp_path: Path) -> None:
    class Other(nn.Linear):
        pass

    path = CheckpointStore(tmp_path).save("rl", 1, model=small(), state={})
    with pytest.raises(CheckpointError, match="its class is Linear, here Other"):
        load(path, model=Other(8, 8))


def test_another_optimizer_is_refused_before_anything_changes(tmp_path: Path) -> None:
    model = small()
    store = CheckpointStore(tmp_path)
    adam = torch.optim.AdamW(model.parameters())
    path = store.save("rl", 1, model=model, optimizer=adam, state={})
    other = nn.Linear(8, 8)
    before = weights(other)
    with pytest.raises(CheckpointError, match="state of AdamW, the run uses SGD"):
        load(path, model=other, optimizer=torch.optim.SGD(other.parameters()))
    with pytest.raises(CheckpointError, match=r"groups of \[2\] parameters, the run's has \[1\]"):
        load(path, model=other, optimizer=torch.optim.AdamW([other.weight]))
    bare = store.save("rl", 2, model=model, state={})
    with pytest.raises(CheckpointError, match="no optimizer state"):
        load(bare, model=other, optimizer=torch.optim.AdamW(other.parameters()))
    with pytest.raises(CheckpointError, match="not in the model"):
        store.save("rl", 3, model=model, optimizer=torch.optim.SGD(other.parameters()), state={})
    assert_same(before, weights(other))


# --- damage ------------------------------------------------------------------------------------


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def alter(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-2] ^= 1
    path.write_bytes(content)


def lengthen(path: Path) -> None:
    path.write_bytes(path.read_bytes() + b"\0")


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run with two checkpoints, each with all its files."""
    model = small()
    store = CheckpointStore(tmp_path / "run" / "checkpoints")
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    for step in (1, 2):
        store.save("rl", step, model=model, optimizer=optimizer, state={"step": step})
    return tmp_path / "run"


FILES = ["model.safetensors", "optimizer.safetensors", "optimizer.json", "state.json"]


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize(
    ("damage", "kind"),
    [(truncate, "truncated"), (alter, "altered"), (lengthen, "altered"), (os.remove, "missing")],
)
def test_a_damaged_file_is_named(run: Path, name: str, damage: Any, kind: str) -> None:
    newest = run / "checkpoints" / "rl-000002"
    damage(newest / name)
    for place in (run, run / "checkpoints", newest):
        (problem,) = check(place)
        assert (problem.checkpoint, problem.file, problem.kind) == (newest, name, kind)
        assert f"rl-000002/{name} is {kind}" in str(problem)
    assert check(run / "checkpoints" / "rl-000001") == []
    model = nn.Linear(8, 8)
    before = weights(model)
    with pytest.raises(CheckpointError, match=f"rl-000002/{name} is {kind}"):
        load(newest, model=model)
    assert_same(before, weights(model))


@pytest.mark.parametrize(
    ("damage", "kind"),
    [
        (truncate, "unreadable"),
        (lambda path: path.write_text(path.read_text().replace('step": 2', 'step": 3')), "altered"),
        (lambda path: path.write_text("[]"), "altered"),
        (os.remove, "missing"),
    ],
)
def test_a_damaged_manifest_is_named(run: Path, damage: Any, kind: str) -> None:
    damage(run / "checkpoints" / "rl-000002" / "manifest.json")
    assert [(p.file, p.kind) for p in check(run)] == [("manifest.json", kind)]
    with pytest.raises(CheckpointError, match="rl-000002/manifest.json is " + kind):
        CheckpointStore(run / "checkpoints").latest()


def test_an_extra_file_is_found_but_does_no_harm(run: Path) -> None:
    (run / "checkpoints" / "rl-000002" / "notes.txt").write_text("mine")
    assert [(p.file, p.kind) for p in check(run)] == [("notes.txt", "extra")]
    latest = CheckpointStore(run / "checkpoints").latest()
    assert latest is not None
    assert load(latest.path, model=small()) == {"step": 2}


def made_run(runs: Path, name: str) -> RunFolder:
    """A run with checkpoints of the steps 1 and 2."""
    folder = create_run(runs, name, "name: x\n")
    store = CheckpointStore(folder.checkpoints)
    for step in (1, 2):
        store.save("rl", step, model=small(), state={"run": folder.id}, metric=float(step))
    return folder


def test_a_checkpoint_of_another_run_is_refused_in_a_runs_folder(tmp_path: Path) -> None:
    mine, other = made_run(tmp_path, "mine"), made_run(tmp_path, "other")
    taken, copied = mine.checkpoints / "rl-000002", other.checkpoints / "rl-000002"
    assert check(mine.path) == check(other.path) == []
    shutil.rmtree(taken)
    shutil.copytree(copied, taken)
    told = "manifest.json is foreign: run other-1 saved the checkpoint, .*folder of run mine-1"
    for place in (mine.path, taken):
        (problem,) = check(place)
        assert re.search(told, str(problem))
    for use in (
        lambda: load(taken, model=small()),
        lambda: read_state(taken),
        lambda: find_checkpoint(mine),
        lambda: find_checkpoint(mine, "rl-000002"),
    ):
        with pytest.raises(CheckpointError, match=told):
            use()
    assert find_checkpoint(mine, "rl-000001").step == 1
    store = CheckpointStore(mine.checkpoints)
    assert [info.step for info in store.list()] == [1]
    skipped = store.latest(skip_damaged=True)
    assert skipped is not None
    assert skipped.step == 1


def test_runs_of_one_id_differ(tmp_path: Path) -> None:
    mine, other = made_run(tmp_path / "a", "demo"), made_run(tmp_path / "b", "demo")
    shutil.rmtree(mine.checkpoints)
    shutil.copytree(other.checkpoints, mine.checkpoints)
    problems = check(mine.path)
    assert len(problems) == 2
    assert "another run of the same id saved the checkpoint" in str(problems[0])


def test_a_checkpoint_may_be_copied_out_and_a_run_renamed(tmp_path: Path) -> None:
    run = made_run(tmp_path, "demo")
    outside = tmp_path / "kept"
    shutil.copytree(run.checkpoints / "rl-000002", outside)
    assert load(outside, model=small()) == {"run": "demo-1"}
    os.rename(run.path, tmp_path / "renamed")
    moved = RunFolder(tmp_path / "renamed")
    assert check(moved.path) == []
    assert load(find_checkpoint(moved).path, model=small()) == {"run": "demo-1"}


def test_a_checkpoint_of_another_step_is_refused(tmp_path: Path) -> None:
    run = made_run(tmp_path, "demo")
    shutil.rmtree(run.checkpoints / "rl-000002")
    shutil.copytree(run.checkpoints / "rl-000001", run.checkpoints / "rl-000002")
    with pytest.raises(CheckpointError, match="was saved as rl-000001: rename it back"):
        load(run.checkpoints / "rl-000002", model=small())


def test_checkpoints_of_a_run_without_an_identity_are_accepted(tmp_path: Path) -> None:
    run = made_run(tmp_path, "demo")
    run.facts.unlink()
    assert check(run.path) == []


def test_check_needs_a_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="neither a checkpoint nor a run"):
        check(tmp_path)
    with pytest.raises(CheckpointError, match="no checkpoint"):
        load(tmp_path / "rl-000001", model=small())


def test_a_damaged_newest_is_refused_or_skipped_on_request(
    run: Path, caplog: pytest.LogCaptureFixture
) -> None:
    store = CheckpointStore(run / "checkpoints")
    alter(store.folder / "rl-000002" / "model.safetensors")
    with pytest.raises(CheckpointError) as caught:
        store.latest()
    assert "rl-000002/model.safetensors is altered" in str(caught.value)
    assert "rl-000001" in str(caught.value)
    assert "add --skip-damaged" in str(caught.value)
    with caplog.at_level(logging.WARNING):
        info = store.latest(skip_damaged=True)
    assert info is not None
    assert info.path.name == "rl-000001"
    assert "rl-000002" in caplog.text

    alter(store.folder / "rl-000001" / "state.json")
    for skip in (False, True):
        with pytest.raises(CheckpointError, match=r"No checkpoint of .* is intact"):
            store.latest(skip_damaged=skip)


def test_a_skipped_one_is_set_aside_by_the_next_save(run: Path) -> None:
    store = CheckpointStore(run / "checkpoints")
    (store.folder / "rl-000002" / "manifest.json").unlink()
    store.save("rl", 3, model=small(), state={})
    assert names_in(store.folder) == [".damaged-rl-000002", "rl-000001", "rl-000003"]
    latest = store.latest()
    assert latest is not None
    assert latest.step == 3


# --- which stay --------------------------------------------------------------------------------


def save_all(store: CheckpointStore, metrics: list[float | None], **more: Any) -> list[str]:
    for step, metric in enumerate(metrics):
        store.save("rl", step, model=small(), state={}, metric=metric, **more)
    return names_in(store.folder)


def test_last_best_and_pinned_stay(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=2, keep_best=1)
    store.save("sft", 9, model=small(), state={}, metric=0.1, pin=True)
    assert save_all(store, [0.2, 0.7, 0.5, 0.7, 0.3, None, 0.1]) == [
        "rl-000003",  # of equal metrics, the newer
        "rl-000005",
        "rl-000006",
        "sft-000009",
    ]
    latest, best = store.latest(), store.best()
    assert latest is not None
    assert best is not None
    assert (latest.step, best.step, best.metric) == (6, 3, 0.7)
    assert store.list()[0].path.name == "sft-000009"
    assert [info.pinned for info in store.list()] == [True, False, False, False]


def test_nan_is_no_metric(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1, keep_best=2)
    assert save_all(store, [0.5, float("nan"), None]) == ["rl-000000", "rl-000002"]


def test_a_metric_can_follow_the_save(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path, keep_last=1, keep_best=1, metric="evaluate/success")
    save_all(store, [0.4, 0.2])
    assert store.set_metric("rl", 1, 0.5)
    assert names_in(tmp_path) == ["rl-000001"], "the former best is removed"
    best = store.best()
    assert best is not None
    assert (best.step, best.metric, best.metric_name) == (1, 0.5, "evaluate/success")
    assert check(tmp_path) == []

    before = (tmp_path / "rl-000001" / "manifest.json").read_bytes()
    assert store.set_metric("rl", 1, 0.5)
    assert (tmp_path / "rl-000001" / "manifest.json").read_bytes() == before
    assert not store.set_metric("rl", 2, 0.5), "there is no such checkpoint"
    assert store.set_metric("rl", 1, float("nan"))
    assert store.best() is None


def test_a_killed_write_of_a_metric_leaves_no_file(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    folder = store.save("rl", 1, model=small(), state={})
    (folder / ".tmp-manifest.json.1-999999999").write_text("{")
    CheckpointStore(tmp_path)
    assert check(tmp_path) == []


def test_a_changed_metric_is_not_compared_with_the_former(tmp_path: Path) -> None:
    save_all(CheckpointStore(tmp_path, keep_last=9, metric="rollout/reward"), [3.0, 2.0])
    later = CheckpointStore(tmp_path, keep_last=9, metric="evaluate/success")
    later.save("rl", 5, model=small(), state={}, metric=0.1)
    best = later.best()
    assert best is not None
    assert best.step == 5


def test_newest_is_by_order_of_saving_not_by_name(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for stage, step in (("sft", 900), ("rl", 5), ("a-stage", 1)):
        store.save(stage, step, model=small(), state={})
    latest = CheckpointStore(tmp_path).latest()
    assert latest is not None
    assert (latest.stage, latest.step, latest.sequence) == ("a-stage", 1, 3)


@pytest.mark.parametrize("moment", ["list_checkpoints", "file_sha256"])
def test_a_reader_finds_the_newest_while_a_training_saves_and_removes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, moment: str
) -> None:
    """`moment`: the function of the reader that the training overtakes."""
    training = CheckpointStore(tmp_path, keep_last=1, keep_best=0)
    training.save("rl", 1, model=small(), state={})
    module = checkpoint if moment == "list_checkpoints" else manifest
    read = getattr(module, moment)
    overtaken = False

    def overtake(path: Path) -> Any:
        nonlocal overtaken
        result = read(path)
        if not overtaken:
            overtaken = True
            training.save("rl", 2, model=small(), state={})
        return result

    monkeypatch.setattr(module, moment, overtake)
    newest = CheckpointStore(tmp_path).latest()
    assert newest is not None
    assert newest.step == 2


def test_a_manifest_removed_by_a_training_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path)
    gone = store.save("rl", 1, model=small(), state={})
    store.save("rl", 2, model=small(), state={})
    folders = checkpoint_folders(tmp_path)
    shutil.rmtree(gone)
    monkeypatch.setattr(listing, "checkpoint_folders", lambda _: folders)
    newest = store.latest()
    assert newest is not None
    assert newest.step == 2


def test_the_same_step_saved_again_replaces(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path)
    for attempt in (1, 2):
        path = store.save("rl", 1, model=small(), state={"attempt": attempt})
    assert names_in(tmp_path) == ["rl-000001"]
    assert load(path, model=small()) == {"attempt": 2}


def test_an_empty_or_absent_folder_has_none(tmp_path: Path) -> None:
    store = CheckpointStore(tmp_path / "absent")
    assert (store.latest(), store.best(), store.list()) == (None, None, [])
    assert not store.folder.exists()


def test_wrong_arguments(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="keep_last = 0"):
        CheckpointStore(tmp_path, keep_last=0)
    for stage in ("", "../x", "a/b", ".hidden"):
        with pytest.raises(CheckpointError, match="cannot name"):
            CheckpointStore(tmp_path).save(stage, 1, model=small(), state={})


# --- the disk ----------------------------------------------------------------------------------


@pytest.fixture
def full_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 256 KiB."""
    mount = tmp_path / "disk"
    mount.mkdir()
    command = ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", str(mount)]
    if shutil.which("mount") is None or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting a small file system needs root")
    try:
        yield mount
    finally:
        subprocess.run(["umount", "-l", str(mount)], check=True)


def test_a_full_disk_leaves_the_older_checkpoints(full_disk: Path) -> None:
    store = CheckpointStore(full_disk / "checkpoints")
    store.save("rl", 1, model=small(), state={"step": 1})
    with pytest.raises(CheckpointError) as caught:
        store.save("rl", 2, model=nn.Linear(300, 300), state={})
    assert "No space left on device" in str(caught.value)
    assert "needs 365.3 kB" in str(caught.value)
    assert "kB are free" in str(caught.value)
    assert names_in(store.folder) == ["rl-000001"]
    assert check(store.folder) == []
    store.save("rl", 2, model=small(), state={})  # and it goes on once there is room


@pytest.mark.parametrize("limit", [300, 5000, 12000])
def test_a_write_that_fails_midway_leaves_the_older_checkpoints(run: Path, limit: int) -> None:
    """A limit on the size of files: it strikes at the first, a later, or the last file."""
    store = CheckpointStore(run / "checkpoints", keep_last=1)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    state = {"long": "x" * 8000} if limit == 5000 else {"long": "x" * 20000}
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        with pytest.raises(CheckpointError, match=r"File too large.*It needs .* are free"):
            store.save("rl", 2, model=small(), state=state)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert names_in(store.folder) == ["rl-000001", "rl-000002"]
    assert check(run) == []


def test_what_does_not_read_back_is_not_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def save_other(tensors: dict[str, Tensor], path: Path) -> None:
        whole(tensors, path)
        alter(path)

    whole = checkpoint.save_file
    monkeypatch.setattr(checkpoint, "save_file", save_other)
    with pytest.raises(CheckpointError, match="differs when read back"):
        CheckpointStore(tmp_path).save("rl", 1, model=small(), state={})
    assert names_in(tmp_path) == []


def test_an_interrupt_leaves_nothing(tmp_path: Path) -> None:
    def write_half() -> None:
        with checkpoint_folder(tmp_path / "new", 0) as folder:
            (folder / "half").write_text("half")
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_half()
    assert names_in(tmp_path) == []


def test_a_failed_replacement_puts_the_former_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = CheckpointStore(tmp_path)
    store.save("rl", 1, model=small(), state={"attempt": 1})
    rename = os.rename

    def fail_on_the_new(source: Path, target: Path) -> None:
        if Path(source).name.startswith(".tmp-"):
            raise OSError(errno.EIO, "Input/output error")
        rename(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fail_on_the_new)
        with pytest.raises(CheckpointError, match="Input/output error"):
            store.save("rl", 1, model=small(), state={"attempt": 2})
    assert names_in(tmp_path) == ["rl-000001"]
    assert read_state(tmp_path / "rl-000001") == {"attempt": 1}


def test_leftovers_of_the_living_stay(tmp_path: Path) -> None:
    living, dead = os.getppid(), 2**22 + 1  # above the largest process number of Linux
    for name in (f".tmp-a-{living}", f".tmp-b-{dead}", f".old-c-{dead}", f".old-d-{living}"):
        (tmp_path / name).mkdir()
    recover(tmp_path)
    assert names_in(tmp_path) == [f".old-d-{living}", f".tmp-a-{living}", "c"]
    with checkpoint_folder(tmp_path / "e", 0) as folder:
        recover(tmp_path)
        assert folder.is_dir()


# --- kill -9 -----------------------------------------------------------------------------------

# Runs in a process of its own, which forks the savers: torch is imported once.
SAVER = """
import json, os, random, shutil, signal, sys, time, traceback
from pathlib import Path

import torch

from ludus.train.checkpoint.policy import find_checkpoint
from ludus.train.checkpoint.state import fingerprint
from ludus.train.checkpoint.listing import check, checkpoint_folders
from ludus.train.checkpoint.loading import load
from ludus.train.checkpoint.store import CheckpointStore

torch.set_num_threads(1)
model = torch.nn.Sequential(torch.nn.Linear(16, 16), torch.nn.BatchNorm1d(16))
optimizer = torch.optim.AdamW(model.parameters())


def train_and_save(store, step):
    model(torch.randn(4, 16)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    state = {"step": step, "fingerprint": fingerprint(model)}
    store.save("rl", step, model=model, optimizer=optimizer, state=state, metric=step % 7)


def verified_step():
    "Opens the store as a resumed run does; every visible checkpoint must be whole."
    store = CheckpointStore(folder)
    info = store.latest()
    state = load(info.path, model=model, optimizer=optimizer)
    assert state == {"step": info.step, "fingerprint": fingerprint(model)}, state
    assert check(folder) == [], check(folder)
    hidden = [path.name for path in folder.iterdir() if path.name.startswith(".")]
    assert not hidden, hidden
    return info.step


def at_random_moments():
    draw, half_written, saved = random.Random(0), 0, 0
    train_and_save(CheckpointStore(folder), 0)
    for _ in range(15):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            store, step = CheckpointStore(folder), saved
            while True:
                step += 1
                train_and_save(store, step)
                os.write(write, step.to_bytes(4, "big"))
        os.close(write)
        time.sleep(draw.uniform(0.0, 0.06))
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        reported = b""
        while chunk := os.read(read, 65536):
            reported += chunk
        os.close(read)
        returned = int.from_bytes(reported[-4:], "big") if reported else saved
        half_written += any(path.name.startswith(".") for path in folder.iterdir())
        saved = verified_step()
        assert saved in (returned, returned + 1), (saved, returned)
    return {"half_written": half_written, "saved": saved}


CHANGES = ("os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.rmtree")


def at_every_call(step):
    "Kills the saver before its first, second, ... call that changes the disk."
    store = CheckpointStore(folder, keep_last=2)
    for earlier in (1, 2, 3):
        train_and_save(store, earlier)
    pristine = folder.with_name("pristine")
    shutil.copytree(folder, pristine)
    before = json.loads((folder / "rl-000003" / "state.json").read_text())
    kills, half_written, found = 0, 0, set()
    while True:
        pid = os.fork()
        if pid == 0:
            left = kills

            def kill_at(event, args):
                nonlocal left
                if event in CHANGES or (event == "open" and args[2] & (os.O_WRONLY | os.O_RDWR)):
                    left -= 1
                    if left == -1:
                        os.kill(os.getpid(), signal.SIGKILL)

            sys.addaudithook(kill_at)
            train_and_save(store, step)
            os._exit(0)
        _, status = os.waitpid(pid, 0)
        half_written += any(path.name.startswith(".") for path in folder.iterdir())
        state = json.loads((folder / f"rl-{verified_step():06d}" / "state.json").read_text())
        assert state["step"] in (3, step)
        found.add("old" if state == before else "new")
        if os.WIFEXITED(status):
            assert os.WEXITSTATUS(status) == 0 and state != before
            return {"half_written": half_written, "kills": kills, "found": sorted(found)}
        kills += 1
        shutil.rmtree(folder)
        shutil.copytree(pristine, folder)
        load(folder / "rl-000003", model=model, optimizer=optimizer)


results, parent = {}, os.getpid()
for name, step in {"new": 4, "replacing": 3, "random": None}.items():
    folder = Path(sys.argv[1]) / name / "checkpoints"
    try:
        result = at_every_call(step) if step else at_random_moments()
    except Exception:
        result = {"error": traceback.format_exc()}
        if os.getpid() != parent:
            print(result["error"], file=sys.stderr)
            os._exit(1)
    results[name] = result
print(json.dumps(results))
"""


@pytest.fixture(scope="module")
def killed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-c", SAVER, str(tmp_path_factory.mktemp("killed"))],
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    results: dict[str, dict[str, Any]] = json.loads(done.stdout)
    return results


@pytest.mark.slow
def test_killed_at_random_moments(killed: dict[str, dict[str, Any]]) -> None:
    assert "error" not in killed["random"], killed["random"]["error"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["new", "replacing"])
def test_killed_at_every_change_of_the_disk(killed: dict[str, dict[str, Any]], kind: str) -> None:
    result = killed[kind]
    assert "error" not in result, result["error"]
    assert result["kills"] > 12
    assert result["half_written"] > 8
    assert result["found"] == ["new", "old"]
