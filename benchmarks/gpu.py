"""What one GPU makes of flowalign, in one command: `python benchmarks/gpu.py`.

Wants torch >= 2.11, one GPU of 48 GB or more, 20 GB of memory and of disk, no network; under nine
minutes. It runs the tests that need a GPU, every stage on the tiny model, and updates of Flow-OPD
on the exact structure of Stable Diffusion 3.5 Medium with random weights: with two and four
teachers, gradient checkpointing, fp8, nf4, deterministic, compiled. Of each
it notes seconds, the peak of memory, what `flowalign doctor` predicts, and which share of this
GPU's own bf16 matrix products the counted operations reach.

Every case has a time limit, and runs in a process of its own kind: what fails, or is not
installed, is a row that says why. Results are written after each case, to docs/gpu.md and
docs/gpu_NAME.json. `--device cpu --width 0.05 --layers 2 --size 64` tries all of it without a GPU.

With --trace every student's row also says by which kernels its third update spends its time, and
how long the GPU waits. Not yet run, for half of the chip's rate with compiled models:
`python benchmarks/gpu.py --trace --cases "matrix products" "write the Medium" "32 images"
"rollouts of 16" "micro-batch 16" "LoRA of one layer" --prompts 32`.
"""

from __future__ import annotations

import argparse
import gc
import importlib.util
import json
import multiprocessing
import os
import platform
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures import TimeoutError as TooLong  # Python 3.10: not the built-in one
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from transformers import PreTrainedTokenizerFast

from flowalign.backbone import DTYPES, Backbone, structure
from flowalign.backbone.shapes import Architecture, public
from flowalign.backbone.tiny import MODEL
from flowalign.config import ModelConfig

ROOT = Path(__file__).resolve().parent.parent
CONFIGS = ROOT / "configs"
GIB = 2**30
PACKAGES = ("torch", "diffusers", "transformers", "peft", "accelerate", "bitsandbytes", "xformers",
            "flash-attn", "sageattention")  # fmt: skip
STARTING = 180.0  # seconds that a worker may take to import torch and its friends


class NotHere(Exception):
    """A case for which this machine lacks a package: which."""


@dataclass(frozen=True)
class Setup:
    """What all cases share: where the model lies, and how large it and its images are."""

    folder: Path
    device: str
    width: float
    layers: int | None
    size: int
    prompts: int
    trace: bool = False


@dataclass(frozen=True)
class Case:
    """One row. call(setup, case): what it measured. alone: in a process that no other case has
    used or will use. limit: seconds."""

    name: str
    call: Callable[[Setup, Case], Mapping[str, Any]]
    given: tuple[str, ...] = ()
    teachers: int = 2
    limit: float = 90.0
    alone: bool = False
    environment: tuple[tuple[str, str], ...] = ()


# Models of random weights, and random LoRAs on them ----------------------------------------------


def changed(whole: Architecture, part: str, **changes: Any) -> Architecture:
    """The architecture with other entries in the config of a part."""
    return replace(whole, parts={**whole.parts, part: {**whole.parts[part], **changes}})


def shapes(width: float = 1.0, layers: int | None = None) -> Architecture:
    """A share of the attention heads, and the first layers (None = all 24). Where there are fewer,
    half of them attend twice, as in the whole model."""
    medium = scaled(public()["stabilityai/stable-diffusion-3.5-medium"], width)
    if not layers:
        return medium
    all_dual = medium.parts["transformer"]["dual_attention_layers"]
    dual = [i for i in all_dual if i < (layers + 1) // 2]
    return changed(medium, "transformer", num_layers=layers, dual_attention_layers=dual)


def flux(width: float = 1.0, layers: int | None = None) -> Architecture:
    """FLUX.1-dev with a share of the attention heads, and with so many double blocks and twice as
    many single ones."""
    layers = layers or 19
    whole = changed(
        public()["black-forest-labs/FLUX.1-dev"],
        "transformer",
        num_attention_heads=max(1, round(24 * width)),
        num_layers=layers,
        num_single_layers=2 * layers,
    )
    return with_scaled_vae(whole, width)


def scaled(whole: Architecture, width: float) -> Architecture:
    """The same structure with `width` times the attention heads and VAE channels."""
    transformer = whole.parts["transformer"]
    heads = max(1, round(transformer["num_attention_heads"] * width))
    inside = heads * transformer["attention_head_dim"]
    narrow = changed(whole, "transformer", num_attention_heads=heads, caption_projection_dim=inside)
    return with_scaled_vae(narrow, width)


def with_scaled_vae(whole: Architecture, width: float) -> Architecture:
    """With `width` times the channels of the VAE."""
    vae = whole.parts["vae"]
    groups = max(1, round(vae["norm_num_groups"] * width))
    channels = [groups * max(1, round(n * width / groups)) for n in vae["block_out_channels"]]
    return changed(whole, "vae", block_out_channels=channels, norm_num_groups=groups)


def with_small_text(whole: Architecture, vocabulary: int) -> Architecture:
    """With one-layer text encoders of the same output sizes."""
    clip = {"num_hidden_layers": 1, "intermediate_size": 64}
    t5 = {"num_layers": 1, "d_ff": 64, "num_heads": 1}
    ends = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 3, "vocab_size": vocabulary}
    for name, config in whole.parts.items():
        if name.startswith("text_encoder"):
            fewer = t5 if config["model_type"] == "t5" else clip
            whole = changed(whole, name, **ends, **fewer)
    return whole


def pipeline(architecture: Architecture, seed: int = 0, device: str = "cpu") -> Any:
    """A whole pipeline on a device, where its weights are drawn: random weights, small text
    encoders of the right output sizes, and the tiny world's tokenizer."""
    tokenizers = {
        name.replace("text_encoder", "tokenizer"): PreTrainedTokenizerFast.from_pretrained(
            MODEL / "tokenizer", model_max_length=77 if "clip" in part["model_type"] else 512
        )
        for name, part in architecture.parts.items()
        if name.startswith("text_encoder")
    }
    with torch.random.fork_rng(devices=[]), torch.device(device):
        torch.manual_seed(seed)
        pipe = structure.build(with_small_text(architecture, len(tokenizers["tokenizer"])))
    for name, tokenizer in tokenizers.items():
        setattr(pipe, name, tokenizer)
        pipe.register_modules(**{name: tokenizer})
    return pipe


def write(
    folder: Path,
    width: float = 1.0,
    layers: int | None = None,
    *,
    adapters: Sequence[str] = ("a", "b"),
    dtype: str = "float32",
    rank: int = 32,
    alpha: float = 64.0,
    device: str = "cpu",
) -> str:
    """Write the Medium and LoRAs on it, each into its folder there; returns the model's. device:
    where the weights are drawn."""
    model = str(folder / "model")
    pipeline(shapes(width, layers), device=device).to(DTYPES[dtype]).save_pretrained(model)
    config = ModelConfig.model_validate({"id": model, "dtype": dtype})
    write_adapters(folder, config, adapters, rank=rank, alpha=alpha)
    return model


def write_adapters(
    folder: Path, model: ModelConfig, names: Sequence[str], *, rank: int, alpha: float
) -> None:
    """LoRAs of random weights on a model."""
    backbone = Backbone.load(model)
    for name in names:
        backbone.add_adapter(name, rank=rank, alpha=alpha)
        for parameter in backbone.adapter_parameters(name):
            torch.nn.init.normal_(parameter, std=0.01)
        backbone.save_adapter(name, folder / name)


# What is measured --------------------------------------------------------------------------------


def tests(setup: Setup, case: Case) -> Mapping[str, Any]:
    """`pytest -m gpu`. On a CPU they are collected and skipped."""
    command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider"]
    found = subprocess.run(
        [*command, *case.given],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=max(1.0, case.limit - 5),  # before this process is killed, which would leave it
    )
    last = (found.stdout.strip().splitlines() or ["no output"])[-1].strip("= ")
    if found.returncode:
        failed = [line for line in found.stdout.splitlines() if line.startswith("FAILED")]
        raise RuntimeError("; ".join([last, *failed])[:600])
    return {"note": last}


def warm(call: Callable[[], object], device: str, repeats: int) -> float:
    """Seconds of a call, mean of so many after as many that load what it needs."""
    seconds = 0.0
    for _ in range(2):
        began = time.perf_counter()
        for _ in range(repeats):
            call()
        if device == "cuda":
            torch.cuda.synchronize()
        seconds = time.perf_counter() - began
    return seconds / repeats


def rate(setup: Setup, case: Case) -> Mapping[str, Any]:
    """FLOP/s of large matrix products in bf16."""
    repeats = 8
    size = 8192 if setup.device == "cuda" else 1024
    a = torch.randn(size, size, device=setup.device, dtype=torch.bfloat16)
    seconds = warm(lambda: torch.mm(a, a), setup.device, repeats)
    found = 2 * size**3 / seconds  # a multiplication and an addition each
    return {"rate": found, "note": f"{found / 1e12:.4g} TFLOP/s"}


def stage(setup: Setup, case: Case) -> Mapping[str, Any]:
    """A config of the tiny world, cut short: its path, then changes."""
    from flowalign.commands import run
    from flowalign.config import EvalStage, Job, Stage, load
    from flowalign.eval.evaluation import evaluate

    path, *changes = case.given
    out = setup.folder / re.sub(r"\W+", "_", case.name)
    config = load(ROOT / path, [f"output={out}", *changes], stage=Stage)
    began = time.perf_counter()
    if isinstance(config, EvalStage):
        evaluate(config)
    else:
        assert isinstance(config, Job)
        run.run_job(config, ROOT / Path(path).parent, resume=False)
    return {"note": f"{time.perf_counter() - began:.1f} s"}


def merged(setup: Setup, case: Case) -> Mapping[str, Any]:
    """Two of the shipped tiny teachers as one adapter."""
    from flowalign.teachers.merge import merge

    merge(["tiny/ocr", "tiny/geneval"], setup.folder / "merged")
    return {}


def written(setup: Setup, case: Case) -> Mapping[str, Any]:
    """The model of random weights and its teachers, for the cases that follow."""
    names = [f"t{index}" for index in range(case.teachers)]
    write(
        setup.folder, setup.width, setup.layers,
        adapters=names, dtype="bfloat16", device=setup.device,
    )  # fmt: skip
    return {}


def written_flux(setup: Setup, case: Case) -> Mapping[str, Any]:
    """FLUX.1-dev with random weights, in place of the Medium: a disk may not hold both."""
    folder = setup.folder / "model"
    shutil.rmtree(folder, ignore_errors=True)
    torch.set_default_dtype(torch.bfloat16)  # its 12 billion weights in float32 fill a GPU
    try:
        pipe = pipeline(flux(setup.width, setup.layers), device=setup.device)
    finally:
        torch.set_default_dtype(torch.float32)
    pipe.save_pretrained(folder)
    return {}


def decoded(setup: Setup, case: Case) -> Mapping[str, Any]:
    """Seconds an image of the Medium's decoder by dtype; runs decode in float32. Four at once."""
    from diffusers import AutoencoderKL

    vae = AutoencoderKL.from_pretrained(setup.folder / "model" / "vae").to(setup.device)
    assert isinstance(vae, AutoencoderKL)
    side = setup.size // 2 ** (len(vae.config["block_out_channels"]) - 1)
    seconds = {}
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        vae.to(dtype)
        shape = (4, vae.config["latent_channels"], side, side)
        latents = torch.randn(shape, device=setup.device, dtype=dtype)
        with torch.no_grad():
            seconds[dtype] = warm(partial(vae.decode, latents), setup.device, 2) / len(latents)
    texts = [f"{str(dtype)[6:]} {1e3 * found:.1f}" for dtype, found in seconds.items()]
    return {"note": f"{', '.join(texts)} ms an image"}


def student(setup: Setup, case: Case) -> Mapping[str, Any]:
    """An update of the student: its second one (the first warms up)."""
    return updated(student_config(setup, case), setup, case)


def teacher(setup: Setup, case: Case) -> Mapping[str, Any]:
    """The same of a teacher: the file of its method, then changes."""
    return updated(teacher_config(setup, case), setup, case)


def updated(config: Any, setup: Setup, case: Case) -> Mapping[str, Any]:
    """Seconds, peak of memory and operations of a second update, and the doctor's peak."""
    model = config.model
    needs = {"bitsandbytes": model.quantization == "nf4",
             "flash_attn_interface": model.attention == "_flash_3"}  # fmt: skip
    for package, needed in needs.items():
        if needed and not importlib.util.find_spec(package):
            raise NotHere(f"{package} is not installed")
    from accelerate.state import AcceleratorState

    from flowalign.commands.doctor.count import predict
    from flowalign.commands.run import deterministic

    expected = predict(config, device_type=setup.device)
    AcceleratorState._reset_state(reset_partial_state=True)
    with deterministic(config.train.deterministic):
        seconds, peak, kernels = measured(config, setup.device, setup.trace)
    return {
        "seconds": seconds,
        "images": config.rollout.prompts * config.rollout.group_size,
        "peak": peak,
        "predicted": expected.peak,
        "flops": {phase.name: phase.flops for phase in expected.phases},
        "kernels": kernels,
    }


def of_all(setup: Setup) -> list[str]:
    """What the updates of students and teachers share: three of them, of the model that was
    written."""
    return [
        "evaluation=null", f"model.id={setup.folder / 'model'}", "model.dtype=bfloat16",
        f"model.height={setup.size}", f"model.width={setup.size}",
        "model.offload_text_encoders=false", "optimizer.updates_per_rollout=1",
        "train.trackers=[]", "train.updates=3", "train.sample_every=1000000",
        f"output={setup.folder / 'run'}",
    ]  # fmt: skip


def student_config(setup: Setup, case: Case) -> Any:
    """The student's preset with random teachers, each with a task of the tiny world's prompts:
    rollouts of seven forward passes with guidance, of which two states are labelled and learnt
    from."""
    from flowalign.config import OpdStage, load, parse

    shape = [
        *of_all(setup), "rollout.kind=sde",
        "rollout.steps=10", "rollout.window=[6, 8]", f"rollout.prompts={setup.prompts}",
        "rollout.group_size=1", "rollout.batch_size=4", "student.noise_levels={select: all}",
        "student.label_batch=8", "optimizer.micro_batch=4",
    ]  # fmt: skip
    path = CONFIGS / "sd35_medium/student_flow_opd_paper.yaml"
    config = load(path, [*shape, *case.given], stage=OpdStage)
    names = [f"t{index}" for index in range(case.teachers)]
    data = config.model_dump(mode="json")
    guidance = config.rollout.guidance
    data["lora"]["init"] = None
    data["anchor"]["adapter"] = str(setup.folder / names[0])
    data["teachers"] = {n: {"adapter": str(setup.folder / n), "guidance": guidance} for n in names}
    data["tasks"] = [{"name": n, "prompts": "tiny/ocr_train"} for n in names]
    return parse(data, stage=OpdStage)


def teacher_config(setup: Setup, case: Case) -> Any:
    """A preset of a teacher with groups of two images and a small reward."""
    from flowalign.config import TrainingStage, load, parse

    name, *changes = case.given
    shape = [*of_all(setup), f"rollout.prompts={setup.prompts // 2}", "rollout.group_size=2"]
    data = load(CONFIGS / name, [*shape, *changes], stage=TrainingStage).model_dump(mode="json")
    reward = {"name": "pickscore", "options": {"model": "tiny"}}
    data["tasks"] = [{"name": "any", "prompts": "tiny/preference_train", "reward": reward}]
    return parse(data, stage=TrainingStage)


PARTS: Mapping[str, Callable[[Any, Any], Any]] = {  # of an update: its loop, what the last one made
    "rollout": lambda loop, _: loop.rollout(loop.update),
    "labels": lambda loop, rollout: loop.algorithm.prepare(rollout, loop.update),
    "update": lambda loop, prepared: loop.learn(prepared),
}


KERNELS = {  # families, by parts of a name; the first that fits
    "attention": ("flash", "fmha", "attention", "sdpa"),
    "matrix products": ("gemm", "nvjet", "cutlass", "cublas", "addmm", "::mm", "::bmm"),
    "fused by Inductor": ("triton",),
    "optimizer": ("multi_tensor", "adam", "foreach"),
    "copies": ("memcpy", "memset", "copy"),
}


def measured(
    config: Any, device: str, trace: bool = False
) -> tuple[dict[str, float], int | None, dict[str, dict[str, float]]]:
    """Seconds of the parts of a second update, the peak of memory (None on a CPU), and if asked for
    the seconds of a third update by part and family of kernels (`traced`)."""
    from flowalign.commands import build

    loop, *_ = build.wire(config)
    seconds: dict[str, float] = {}
    for update in (1, 2):  # 0 would take diagnostics
        loop.update = update
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        made = None
        for name, call in PARTS.items():
            began = time.perf_counter()
            made = call(loop, made)
            if device == "cuda":
                torch.cuda.synchronize()
            seconds[name] = time.perf_counter() - began
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else None
    return seconds, peak, traced(loop, device) if trace else {}


def traced(loop: Any, device: str) -> dict[str, dict[str, float]]:
    """{part: {family of kernels: seconds}} of an update; "waiting": of the GPU, for no kernel. On a
    CPU operators stand for kernels."""
    from torch.profiler import ProfilerActivity, profile

    cuda = device == "cuda"
    made = None
    found = {}
    loop.update += 1
    for name, call in PARTS.items():
        began = time.perf_counter()
        with profile(activities=[ProfilerActivity.CUDA if cuda else ProfilerActivity.CPU]) as run:
            made = call(loop, made)
            if cuda:
                torch.cuda.synchronize()
            wall = time.perf_counter() - began
        families = dict.fromkeys([*KERNELS, "other"], 0.0)
        for event in run.key_averages():
            said = event.key.lower()
            fits = (f for f, parts in KERNELS.items() if any(part in said for part in parts))
            spent = event.self_device_time_total if cuda else event.self_cpu_time_total
            families[next(fits, "other")] += spent / 1e6
        found[name] = families | {"waiting": max(0.0, wall - sum(families.values()))}
    return found


# The cases ---------------------------------------------------------------------------------------

SHORT = ("train.updates=2", "train.trackers=[]", "rollout.prompts=8", "evaluation.prompts=8",
         "evaluation.every=2")  # fmt: skip
ONE_TASK = ('tasks=[{name: geneval, prompts: tiny/geneval_train, validation: tiny/geneval_val, '
            'reward: {name: geneval, options: {detector: tiny, reward: official}}}]',
            "teachers={geneval: {adapter: tiny/geneval}}")  # fmt: skip
JUDGES = ("benchmarks=[{name: geneval, prompts: tiny/geneval_test, limit: 16, reward: {name: "
          "geneval, options: {detector: tiny}}}, {name: preference, prompts: tiny/preference_test, "
          "limit: 16, reward: {name: pickscore, options: {model: tiny, normalizer: 28}}}]",
          "models={base: null, ocr: tiny/ocr}", "fidelity=null")  # fmt: skip
COMPILED = ("model.compile=true", "rollout.batch_size=8", "student.label_batch=16",
            "optimizer.micro_batch=8")  # fmt: skip
FLUX = ("flux/teacher_pickscore_nft.yaml", "model.gradient_checkpointing=true",
        "rollout.batch_size=2", "optimizer.micro_batch=2")  # fmt: skip


def cases() -> list[Case]:
    """All of them, the most telling first."""
    tiny = "configs/tiny"
    return [
        Case("matrix products", rate),
        Case("tiny, grpo", stage, (f"{tiny}/teacher_geneval.yaml", *SHORT)),
        Case("tiny, sft", stage, (f"{tiny}/sft.yaml", *ONE_TASK, *SHORT)),
        Case("tiny, opd", stage, (f"{tiny}/student_flow_opd.yaml", *ONE_TASK, *SHORT)),
        Case("tiny, merge", merged),
        Case("tiny, eval", stage, (f"{tiny}/eval.yaml", *JUDGES)),
        Case("write the Medium", written, teachers=4, limit=150),
        Case("VAE decode", decoded),
        Case("2 teachers", student),
        Case("4 teachers", student, teachers=4),
        Case("NFT teacher", teacher, ("sd35_medium/teacher_pickscore_nft.yaml",)),
        Case("GRPO teacher", teacher, ("sd35_medium/teacher_pickscore.yaml",)),
        Case("checkpointing", student, ("model.gradient_checkpointing=true",)),
        Case("fp8", student, ("model.quantization=fp8", "model.gradient_checkpointing=true")),
        Case("nf4", student, ("model.quantization=nf4",)),
        Case("deterministic", student, ("train.deterministic=true",), alone=True,
             environment=(("CUBLAS_WORKSPACE_CONFIG", ":4096:8"),)),
        Case("pytest -m gpu", tests, limit=150),
        Case("compiled", student, ("model.compile=true",), alone=True, limit=180),
        Case("32 images", student, COMPILED, alone=True, limit=180),
        Case("rollouts of 16", student, (*COMPILED, "rollout.batch_size=16"), alone=True,
             limit=180),
        Case("micro-batch 16", student, (*COMPILED, "optimizer.micro_batch=16"), alone=True,
             limit=180),
        # what merged weights, stacked LoRAs and adapters that are cast once can gain at most
        Case("LoRA of one layer", student,
             (*COMPILED, "lora.targets=[transformer_blocks.0.attn.to_q]"), alone=True, limit=180),
        Case("write FLUX.1-dev", written_flux, limit=180),
        Case("FLUX.1-dev, NFT", teacher, FLUX, limit=120),
        Case("FLUX.1-dev, flash attention 3", teacher, (*FLUX, "model.attention=_flash_3"),
             limit=120),
        Case("FLUX.1-dev, NFT, nf4", teacher, (*FLUX, "model.quantization=nf4"), limit=150),
    ]  # fmt: skip


# How they are run --------------------------------------------------------------------------------


def prepare(setup: Setup, environment: Mapping[str, str]) -> None:
    """What a new process does first."""
    if setup.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false", **environment}
    sys.stdout = sys.stderr = open(setup.folder / "log.txt", "a")  # what the runs print
    from flowalign.report.progress import quiet

    quiet()


def attempt(setup: Setup, case: Case) -> tuple[str, dict[str, Any]]:
    """In a process: the state of a case ("ok" | "not here" | "failed"), and what it measured."""
    try:
        return "ok", dict(case.call(setup, case))
    except NotHere as error:
        return "not here", {"note": str(error)}
    except BaseException as error:  # whatever it is, the other cases are to run
        lines = [line.strip() for line in str(error).splitlines() if line.strip()]
        said = f"{type(error).__name__}: {' '.join(lines)[:300]}".strip(": ")
        return "failed", {"note": said}
    finally:  # the next case finds memory empty
        gc.collect()
        if setup.device == "cuda":
            torch.cuda.empty_cache()


class Worker:
    """A process that runs cases, and is replaced by another after one that failed."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup
        self.pool = None

    def run(self, case: Case, seconds: float) -> tuple[str, dict[str, Any]]:
        """The state of a case, and what it measured or why it did not."""
        if case.alone:
            self.stop()
        began = time.monotonic()
        limit = STARTING
        try:
            pool = self.pool or self._start(case, min(STARTING, seconds + 30))
            limit = max(1.0, min(case.limit, seconds - (time.monotonic() - began)))
            answer = pool.submit(attempt, self.setup, replace(case, limit=limit)).result(limit)
        except TooLong:
            answer = "too long", {"note": f"stopped after {limit:.0f} s"}
        except BrokenProcessPool:
            answer = "failed", {"note": "its process ended"}
        if case.alone or answer[0] in ("failed", "too long"):
            self.stop()  # an error may have left the GPU's context broken, or memory held
        return answer

    def _start(self, case: Case, seconds: float) -> ProcessPoolExecutor:
        self.pool = ProcessPoolExecutor(
            1,
            multiprocessing.get_context("spawn"),
            initializer=prepare,
            initargs=(self.setup, dict(case.environment)),
        )
        self.pool.submit(os.getpid).result(seconds)
        return self.pool

    def stop(self) -> None:
        """End the process."""
        if self.pool:
            for process in multiprocessing.active_children():
                process.kill()
            self.pool.shutdown()
        self.pool = None


def run_all(
    cases: Sequence[Case], setup: Setup, minutes: float, see: Callable[[list[dict]], None]
) -> list[dict[str, Any]]:
    """A row for each case; those for which there is no time left are "not run". see: told of all
    rows after each case."""
    end = time.monotonic() + minutes * 60
    rows = []
    worker = Worker(setup)
    try:
        for case in cases:
            began = time.monotonic()
            left = end - began
            late = "not run", {"note": "no time left"}
            state, values = worker.run(case, left) if left > 1 else late
            took = time.monotonic() - began
            rows.append({"case": case.name, "state": state, "took": took, **values})
            print(f"{case.name}: {state} ({took:.0f} s) {values.get('note', '')}", flush=True)
            see(rows)
    finally:
        worker.stop()
    return rows


# What is written ---------------------------------------------------------------------------------

HEAD = """# On a GPU

<!-- needs: torch 2.11 or newer, a GPU of 48 GB or more, 20 GB of disk, nine minutes -->
```bash
python benchmarks/gpu.py
```

This command runs the GPU tests, every stage on the tiny model, and updates of Flow-OPD on the exact
architecture of Stable Diffusion 3.5 Medium with random weights. Those updates use 8 images of 512
pixels, guidance, seven function evaluations per rollout, two trained noise levels, an anchor,
batches of 4, and bfloat16. An update of an NFT and of a GRPO teacher has the shipped settings, but
8 images. The results are written to this page, above its first heading of the second level.
"""


def machine(device: str) -> dict[str, Any]:
    """What it ran on."""
    found: dict[str, Any] = {"name": platform.machine(), "python": platform.python_version()}
    if device == "cuda":
        about = torch.cuda.get_device_properties(0)
        found |= {"name": about.name, "memory": about.total_memory, "cuda": torch.version.cuda}
    for package in PACKAGES:
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def table(rows: Sequence[Mapping[str, Any]], about: Mapping[str, Any]) -> str:
    """Markdown: a line a case. Shares are those of the measured rate of matrix products."""
    speed = next((row["rate"] for row in rows if "rate" in row), None)
    names = ", ".join(f"{k} {v}" for k, v in about.items() if k not in ("name", "memory"))
    memory = f", {about['memory'] / GIB:.0f} GiB" if "memory" in about else ""
    head = f"\n{about['name']}{memory}; {names}. "
    head += "Seconds, and in brackets the share of the GPU's own rate of bf16 matrix products.\n\n"
    columns = ["case", "", "rollout", "labels", "update", "images/s", "peak GiB", "predicted"]
    lines = [f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    for row in rows:
        said = row["state"] + (f": {row['note']}" if row.get("note") else "")
        cells = [row["case"], said.replace("|", "/"), *_numbers(row, speed)]
        lines.append(f"| {' | '.join(cells)} |")
    return head + "\n".join([*lines, *_kernels(rows)]) + "\n"


def _kernels(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """The traces as a table, a line a part of a case: ms."""
    columns = ["ms of kernels in", *KERNELS, "other", "waiting"]
    lines = [
        f"| {row['case']}: {part} | " + " | ".join(f"{1e3 * s:.0f}" for s in spent.values()) + " |"
        for row in rows
        for part, spent in (row.get("kernels") or {}).items()
    ]
    return ["", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|", *lines] if lines else []


def _numbers(row: Mapping[str, Any], speed: float | None) -> list[str]:
    if "seconds" not in row:
        return ["-"] * 6
    found = []
    for name, seconds in row["seconds"].items():
        flops = row["flops"].get(name)  # a GRPO teacher may have no labels
        share = f" ({flops / seconds / speed:.0%})" if speed and flops else ""
        found.append(f"{seconds:.2f}{share}")
    peak = f"{row['peak'] / GIB:.2f}" if row["peak"] else "-"
    pace = row["images"] / sum(row["seconds"].values())
    return [*found, f"{pace:.2f}", peak, f"{row['predicted'] / GIB:.2f}"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the cases; exit status 1 if one failed or took too long."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--minutes", type=float, default=9.0, help="what comes later is not run")
    parser.add_argument("--cases", nargs="*", choices=[case.name for case in cases()], metavar="X")
    parser.add_argument("--device", choices=["cuda", "cpu"], default="cuda")
    parser.add_argument("--width", type=float, default=1.0, help="share of the attention heads")
    parser.add_argument("--layers", type=int, help="of the transformer, instead of 24")
    parser.add_argument("--size", type=int, default=512, help="pixels")
    parser.add_argument("--prompts", type=int, default=8, help="images of a rollout")
    parser.add_argument("--trace", action="store_true", help="students' time by kernels, too")
    parser.add_argument("--out", type=Path, default=ROOT / "docs", help="folder of the results")
    args = parser.parse_args(argv)
    if args.device == "cuda" and not torch.cuda.is_available():
        print("no GPU here; --device cpu --width 0.05 --layers 2 --size 64 tries all of it",
              file=sys.stderr)  # fmt: skip
        return 2
    about = machine(args.device)
    name = re.sub(r"\W+", "_", about["name"]).lower()
    args.out.mkdir(parents=True, exist_ok=True)

    def write(rows: list[dict[str, Any]]) -> None:
        report = {"machine": about, "width": args.width, "size": args.size, "cases": rows}
        (args.out / f"gpu_{name}.json").write_text(json.dumps(report, indent=1) + "\n")
        page = args.out / "gpu.md"
        _, mark, rest = (page.read_text("utf-8") if page.is_file() else "").partition("\n## ")
        page.write_text(HEAD + table(rows, about) + mark + rest, encoding="utf-8")

    chosen = [case for case in cases() if args.cases is None or case.name in args.cases]
    with TemporaryDirectory() as folder:
        size = args.width, args.layers, args.size, args.prompts
        setup = Setup(Path(folder), args.device, *size, args.trace)
        rows = run_all(chosen, setup, args.minutes, write)
    print(table(rows, about))
    return int(any(row["state"] in ("failed", "too long") for row in rows))


if __name__ == "__main__":
    sys.exit(main())
