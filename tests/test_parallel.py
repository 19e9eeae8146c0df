"""Two processes do what one does under each of accelerate's strategies, and can be resumed."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import fakes
import families
import pytest
import torch
from accelerate.commands.config.config_args import ClusterConfig, load_config_from_file
from accelerate.utils import DistributedType
from safetensors.torch import load_file
from torch import Tensor
from torch.testing import assert_close

from flowalign.commands import run
from flowalign.config import ConfigError, to_yaml
from flowalign.training.algorithm import pairs_of
from flowalign.training.run import processes
from flowalign.training.step import filled

ROOT = Path(__file__).parent.parent
ACCELERATE = ROOT / "configs" / "accelerate"
STRATEGIES = ["ddp_2cpu", "fsdp2_8gpu"]
LINEAR = ["optimizer.eps=1.0", "optimizer.lr=30.0"]  # Adam that does not blow rounding up
HELD_OUT = ["evaluation={every: 1, prompts: 5, batch_size: 2}"]  # three batches: one and two


@pytest.mark.parametrize("path", sorted(ACCELERATE.glob("*.yaml")), ids=lambda path: path.stem)
def test_a_config_is_what_its_name_says(path: Path) -> None:
    found = load_config_from_file(str(path))
    assert isinstance(found, ClusterConfig)
    strategy, _, rest = path.stem.partition("_")
    several = path.stem.startswith("multi_node")
    kinds = {"ddp": "MULTI_GPU", "multi": "MULTI_GPU", "fsdp2": "FSDP"}
    assert found.distributed_type == kinds[strategy]
    assert found.num_processes == (16 if several else int(rest[0]))
    assert found.num_machines == (2 if several else 1)
    assert (found.fsdp_config or {}).get("fsdp_version") == (2 if strategy == "fsdp2" else None)
    assert found.mixed_precision is None  # model.dtype says it
    command = path.read_text().splitlines()[0]
    assert command.startswith(f"# accelerate launch --config_file configs/accelerate/{path.name} ")


def test_a_shorter_process_repeats_its_last_micro_batch_without_weight(random_model, tmp_path):
    loop = fakes.wired(fakes.settings(random_model, tmp_path / "run"))
    rollout = loop.rollout(0)
    keep = torch.arange(8) < 3
    found = list(filled(pairs_of(rollout, keep, 8), 4))
    assert [weight for _, weight in found] == [1, 1, 0, 0]
    assert [len(pairs.rows) for pairs, _ in found] == [8, 1, 1, 1]
    (only,) = filled(pairs_of(rollout, keep, 100), 1)
    assert only[1] == 1


class Started:
    """The state of an accelerator that was started with these settings of FSDP."""

    distributed_type = DistributedType.FSDP

    def __init__(self, **plugin: Any) -> None:
        self.fsdp_plugin = type("Plugin", (), plugin)()


FSDP = {"fsdp_version": 2, "cpu_ram_efficient_loading": False}


@pytest.mark.parametrize(
    ("plugin", "override", "said"),
    [
        ({"fsdp_version": 1}, "seed=1", "fsdp_config.fsdp_version"),
        ({"cpu_ram_efficient_loading": True}, "seed=1", "fsdp_cpu_ram_efficient_loading"),
        ({}, "model.quantization=fp8", "model.quantization"),
        ({}, "model.dtype=float16", "model.dtype"),
    ],
)  # fmt: skip
def test_what_is_not_supported_is_refused(
    random_model: str, tmp_path: Path, plugin: dict[str, Any], override: str, said: str
) -> None:
    config = fakes.settings(random_model, tmp_path / "run", override)
    (problem,) = processes._fsdp_problems(config, Started(**{**FSDP, **plugin}))
    assert said in problem


def test_fsdp2_is_supported(random_model: str, tmp_path: Path) -> None:
    config = fakes.settings(random_model, tmp_path / "run", "model.dtype=bfloat16")
    assert list(processes._fsdp_problems(config, Started(**FSDP))) == []


@pytest.fixture
def no_accelerator() -> Iterator[None]:
    """No Accelerator of another test, nor one for the next."""
    fakes.AcceleratorState._reset_state(reset_partial_state=True)
    yield
    fakes.AcceleratorState._reset_state(reset_partial_state=True)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ACCELERATE_USE_DEEPSPEED", "true"),
        ("ACCELERATE_USE_MEGATRON_LM", "True"),
        ("ACCELERATE_USE_PARALLELISM_CONFIG", "true"),
        ("ACCELERATE_FP8_BACKEND", "AO"),
        ("ACCELERATE_FP8_BACKEND", "no"),  # which accelerate does not know
    ],
)
def test_a_variable_that_asks_for_another_strategy_is_refused_before_the_model_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_accelerator: None, key: str, value: str
) -> None:
    monkeypatch.setenv(key, value)
    with pytest.raises(ConfigError, match=f"{key}={value}"):
        run.train(fakes.settings(str(tmp_path / "no_model"), tmp_path / "run"))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "4"),
        ("ACCELERATE_GRADIENT_ACCUMULATION_STEPS", "auto"),
        ("ACCELERATE_MIXED_PRECISION", "fp16"),
        ("ACCELERATE_MIXED_PRECISION", "fp8"),
        ("ACCELERATE_DYNAMO_BACKEND", "aot_eager"),
        ("ACCELERATE_GRADIENT_CLIPPING", "0.01"),
        ("ACCELERATE_FP8_BACKEND", "NO"),
    ],
)
@pytest.mark.parametrize("trains", [True, False])
def test_the_environment_does_not_change_the_arithmetic(
    random_model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_accelerator: None,
    key: str, value: str, trains: bool,
) -> None:  # fmt: skip
    monkeypatch.setenv(key, value)
    config = fakes.settings(random_model, tmp_path / "run")
    made = processes.start(config) if trains else processes.accelerator(config)
    layer = torch.nn.Linear(2, 1, bias=False)
    prepared, _ = made.prepare(layer, torch.optim.SGD(layer.parameters()))
    assert type(prepared) is torch.nn.Linear  # not compiled
    made.backward(prepared(torch.tensor([[3.0, 1 / 3]])).sum())
    assert layer.weight.grad is not None
    assert torch.equal(layer.weight.grad, torch.tensor([[3.0, 1 / 3]]))
    assert processes.os.environ[key] == value  # for whatever the run starts


def test_a_strategy_that_does_not_start_is_refused_before_the_model_is_looked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, no_accelerator: None
) -> None:
    """FSDP in a process without a GPU: accelerate would run something else."""
    monkeypatch.setenv("ACCELERATE_USE_FSDP", "true")
    with pytest.raises(ConfigError, match="asked for FSDP, and accelerate started NO"):
        run.train(fakes.settings(str(tmp_path / "no_model"), tmp_path / "run"))


def launch(strategy: str, *runs: list[object], status: int = 0) -> str:
    """Two processes under a shipped config of accelerate's, one run after the other; what they
    printed to stderr."""
    given = [arg for run in runs for arg in ["--then", *run]]
    done = fakes.launch(ROOT / "tests" / "on_cpu.py", *given, strategy=strategy)
    assert (done.returncode != 0) == (status != 0), done.stderr[-5000:]
    return done.stderr


def written(config: Any, folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.yaml").write_text(to_yaml(config))
    return folder / "config.yaml"


def grpo(model: str, folder: Path, *overrides: str) -> Path:
    """A run whose images of the second process fail or are all alike, so that it has fewer
    micro-batches than the first, evaluated in batches of which it has more."""
    overrides = ("rollout.prompts=4", "rollout.batch_size=16", "grpo.advantage=batch_std",
                 "train.updates=2", "train.checkpoint_every=1", "train.max_invalid_share=0.6",
                 "optimizer.micro_batch=3", *LINEAR, *overrides)  # fmt: skip
    probe = fakes.wired(fakes.settings(model, folder / "probe" / "run", *overrides))
    order = probe.prompts.batch(0).prompts
    options = f"{{bad: {order[3:]!r}, flat: {order[2:3]!r}}}"
    overrides += (*HELD_OUT, f"tasks.0.validation={folder / 'run' / 'prompts.txt'}",
                  f"tasks.0.reward.options={options}")  # fmt: skip
    output = folder / "run" / "alone"
    return written(fakes.settings(model, output, *overrides, reward="Choosy"), folder)


def opd(model: str, folder: Path, *overrides: str) -> Path:
    """A run of two prompts, so that each process has one of the two tasks, or both have one; the
    labels of one task take two forward passes."""
    overrides = ("rollout.batch_size=16", "optimizer.micro_batch=3", "train.updates=2",
                 "teachers.even.extrapolate=1.5", "teachers.even.guidance=2.0",
                 "anchor={adapter: null}", "student.noise_levels={select: random, count: 2}",
                 *LINEAR, *overrides)  # fmt: skip
    return written(fakes.distillation(model, folder / "run" / "alone", *overrides), folder)


def sft(model: str, folder: Path, *overrides: str) -> Path:
    """A run whose noise belongs to the images, not to a process."""
    overrides = ("rollout.prompts=4", "rollout.batch_size=16", "optimizer.micro_batch=3",
                 "train.updates=2", *LINEAR, *overrides)  # fmt: skip
    found = fakes.distillation(model, folder / "run" / "alone", *overrides, stage="sft")
    return written(found, folder)


def nft(model: str, folder: Path, *overrides: str) -> Path:
    """A run whose second process has fewer micro-batches than the first, until its old policy, an
    average, is no longer the student: after the first of two steps of a rollout."""
    overrides = ("rollout.prompts=4", "rollout.batch_size=16", "optimizer.micro_batch=3",
                 "train.updates=2", "optimizer.updates_per_rollout=2",
                 "nft.old={decay: 0.5, rise: 0.25}", *LINEAR, *overrides)  # fmt: skip
    found = fakes.forward(model, folder / "probe" / "run", *overrides)
    flat = fakes.wired(found).prompts.batch(0).prompts[3:]
    options = f"tasks.0.reward.options={{bad: [], flat: {flat!r}}}"
    output = folder / "run" / "alone"
    return written(fakes.forward(model, output, *overrides, options, reward="Choosy"), folder)


def awm(model: str, folder: Path, *overrides: str) -> Path:
    """A run that is held near an average of its own weights, and near the base."""
    overrides = ("rollout.batch_size=16", "optimizer.micro_batch=3", "train.updates=2",
                 "awm.ema_kl_weight=1.0", "awm.kl_weight=0.1", *LINEAR, *overrides)  # fmt: skip
    return written(fakes.forward(model, folder / "run" / "alone", *overrides, stage="awm"), folder)


def gradient(model: str, folder: Path, *overrides: str) -> Path:
    """A run whose thresholds are of whole groups."""
    overrides = ("rollout.batch_size=16", "optimizer.micro_batch=3", "train.updates=2",
                 *LINEAR, *overrides)  # fmt: skip
    return written(fakes.ascending(model, folder / "run" / "alone", *overrides), folder)


def dpo(model: str, folder: Path, *overrides: str) -> Path:
    """A run from a LoRA, a pair a process. A large beta would make much of rounding."""
    start = fakes.teachers(model, folder)["even"]
    overrides = ("optimizer.micro_batch=2", "train.updates=2", f"lora.init={start}", "dpo.beta=10",
                 *LINEAR, *overrides)  # fmt: skip
    return written(fakes.pairs(model, folder / "run" / "alone", *overrides), folder)


def half(model: str, folder: Path) -> Path:
    given = ["model.dtype=bfloat16", "model.gradient_checkpointing=true", "train.updates=2",
             "rollout.guidance=4.5", "optimizer.micro_batch=4", "rollout.batch_size=4",
             "grpo.kl_weight=0.1",
             *LINEAR]  # fmt: skip
    return written(fakes.settings(model, folder / "run" / "alone", *given), folder)


@pytest.fixture(scope="module")
def folders(random_model: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """What one process makes of each of these runs: folder/run/alone beside folder/config.yaml."""
    found = {}
    for make in (grpo, opd, sft, nft, awm, gradient, dpo, half):
        folder = tmp_path_factory.mktemp(make.__name__)
        assert fakes.command("--config", make(random_model, folder)) == 0
        found[make.__name__] = folder
    return found


def state(output: Path) -> dict[str, Tensor]:
    """Adapter, averages and optimizer of the last checkpoint, and the adapter that was kept."""
    last = output / "checkpoints" / "update_000002"
    names = ["adapter", "ema", *(path.stem for path in last.glob("policy_*.safetensors"))]
    found = {f"{name}.{key}": value for name in names
             for key, value in load_file(last / f"{name}.safetensors").items()}  # fmt: skip
    kept = load_file(output / "adapter" / "pytorch_lora_weights.safetensors")
    states = torch.load(last / "states.pt", weights_only=True)
    moments = {f"optimizer.{i}.{key}": torch.as_tensor(value)
               for i, parts in states["optimizer"]["state"].items()
               for key, value in parts.items()}  # fmt: skip
    return found | {f"kept.{key}": value for key, value in kept.items()} | moments


def metrics(output: Path) -> list[dict[str, float]]:
    """The log without times, and without what is of a process's own micro-batches."""
    own = ("second", "cosine", "ratio_error", "image_drift")
    rows = fakes.lines(output)
    return [{k: v for k, v in row.items() if not any(o in k for o in own)} for row in rows]


def assert_alike(output: Path, atol: float) -> None:
    """A run of two processes has the weights of the run of one beside it, in float32."""
    one, two = state(output.with_name("alone")), state(output)
    assert (output / "checkpoints" / "update_000002" / "rng_1.json").exists()  # two, indeed
    for key in (key for key in one if not key.startswith("optimizer")):
        assert two[key].dtype == torch.float32
        assert_close(two[key], one[key], rtol=0, atol=atol, msg=f"{output} {key}")


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_processes_do_what_one_does(folders: dict[str, Path], strategy: str) -> None:
    """And a run that stopped and went on is, to the bit, one that did not."""
    outputs = {name: folder / "run" / strategy for name, folder in folders.items()}
    runs = [["--config", folder / "config.yaml", f"output={outputs[name]}"]
            for name, folder in folders.items()]  # fmt: skip
    config, whole = folders["grpo"] / "config.yaml", outputs["grpo"]
    resumed = whole.with_name(f"{strategy}_resumed")
    runs += [["--config", config, f"output={resumed}", "train.updates=1"],
             ["--config", config, f"output={resumed}", "--resume"]]  # fmt: skip
    launch(strategy, *runs)
    for name, output in outputs.items():
        assert_alike(output, 1e-3 if name == "half" else 1e-5)
        policies = {key.split(".")[0] for key in state(output) if key.startswith("policy_")}
        old = {"policy_old"}
        expected = {"nft": old, "gradient": old, "awm": {"policy_average"}}
        assert policies == expected.get(name, set())
        rows = zip(metrics(output), metrics(output.with_name("alone")), strict=True)
        for found, expected in rows if name != "half" else ():
            assert found == pytest.approx(expected, rel=1e-3, abs=1e-5, nan_ok=True)
    before, again = state(whole), state(resumed)
    assert before.keys() == again.keys()
    assert all(torch.equal(before[key], again[key]) for key in before)
    assert [row["ratio_error"] for row in fakes.lines(outputs["half"])] == [0, 0]
    kept = [v.flatten() for k, v in state(outputs["half"]).items() if k.startswith("kept")]
    flat = torch.cat(kept)
    assert (flat != flat.bfloat16()).float().mean() > 0.5  # nor are they rounded on the way


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_two_processes_with_a_teacher_on_another_base(random_model, tmp_path, strategy: str):
    """Which is not sharded, and labels or samples on one of the processes."""
    large = fakes.larger(tmp_path / "large")
    runs, outputs = [], []
    for make in (opd, sft):
        folder, base = tmp_path / make.__name__, f"teachers.even.base={large}"
        path = make(random_model, folder, "teachers.even.adapter=null", base)
        assert fakes.command("--config", path) == 0
        outputs.append(folder / "run" / strategy)
        runs.append(["--config", path, f"output={outputs[-1]}"])
    launch(strategy, *runs)
    for output in outputs:
        assert_alike(output, 1e-5)
        rows = zip(metrics(output), metrics(output.with_name("alone")), strict=True)
        for found, expected in rows:
            assert found == pytest.approx(expected, rel=1e-3, abs=1e-5, nan_ok=True)


@pytest.mark.parametrize(
    "strategy",
    [
        pytest.param("ddp_2cpu", marks=pytest.mark.slow),
        pytest.param("fsdp2_8gpu", marks=pytest.mark.long),
    ],
)
def test_compiled_blocks_on_two_processes(random_model, tmp_path, strategy: str) -> None:
    """The weights of an eager run in one process. GRPO's second step of a rollout has a ratio."""
    runs = []
    outputs = []
    for make, given in ((grpo, ["optimizer.updates_per_rollout=2"]), (opd, [])):
        path = make(random_model, tmp_path / make.__name__, *given)
        assert fakes.command("--config", path) == 0
        outputs.append(tmp_path / make.__name__ / "run" / strategy)
        runs.append(["--config", path, f"output={outputs[-1]}", "model.compile=true"])
    said = launch(strategy, *runs)
    assert "a graph was traced" in said and "torch.compile failed" not in said
    for output in outputs:
        assert_alike(output, 1e-5)


@pytest.mark.slow
def test_every_family_is_sharded(tmp_path: Path) -> None:
    """By its own blocks, with prompts of different lengths on the two processes."""
    given = ["model.height=64", "rollout.guidance=4.5", "train.updates=2", *LINEAR,
             "optimizer.lr=3.0", "model.max_sequence_length=null"]  # fmt: skip
    runs, outputs = [], []
    for family in ("flux", "klein", "qwen_image", "z_image", "sana"):
        folder = tmp_path / family
        model = str(folder / "model")
        families.pipeline(family).save_pretrained(model)
        path = written(fakes.settings(model, folder / "run" / "alone", *given), folder)
        assert fakes.command("--config", path) == 0
        outputs.append(folder / "run" / "sharded")
        runs.append(["--config", path, f"output={outputs[-1]}"])
    launch("fsdp2_8gpu", *runs)
    for output in outputs:
        assert_alike(output, 1e-5)
        assert any((v != 0).any() for key, v in state(output).items() if ".lora_B." in key)
