"""tools/gpu_check.py on a CPU: whoever gets a GPU for half an hour must not spend it on mending the check."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from types import ModuleType

import pytest
import tomllib
import torch

TOOLS = Path(__file__).resolve().parents[3] / "tools"


@pytest.fixture
def check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module("gpu_check")


@pytest.fixture
def report(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(TOOLS))
    return importlib.import_module("gpu_check_report")


@pytest.fixture
def place(check: ModuleType, tmp_path: Path):
    return check.Place("cpu", True, tmp_path, time.monotonic() + 30)


def test_every_mode_trains_and_agrees_with_float32(tmp_path: Path) -> None:
    """The whole command, without Ray and vLLM, which a lent machine does not have."""
    for name in ("ray", "vllm"):
        (tmp_path / f"{name}.py").write_text(f"raise ImportError('{name} is not needed here')\n")
    done = subprocess.run(
        [
            sys.executable,
            TOOLS / "gpu_check.py",
            "--device",
            "cpu",
            "--out",
            tmp_path,
            "--parts",
            "extension",
            "training",
        ],
        env={**os.environ, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    report = json.loads((tmp_path / "gpu-check-cpu.json").read_text())
    modes = {mode["mode"]: mode for mode in report["parts"]["training"]["figures"]["modes"]}
    assert {"bf16", "fp32", "recompute full", "reference", "experts", "softcap", "zero_stage 3"} <= modes.keys()
    families = {"gpt-oss", "DeepSeek-V3", "Qwen3-Next", "GLM-4.5"}
    assert families | {f"{family} fp32" for family in families} <= modes.keys()
    assert {mode["status"] for mode in modes.values()} == {"passed"}
    assert modes["bf16"]["losses"] != modes["fp32"]["losses"]  # or nothing was in bf16
    assert modes["bf16"]["losses"][-1] < modes["bf16"]["losses"][0]
    assert modes["shared prompts"]["tokens"] < modes["bf16"]["tokens"]
    assert modes["activation_offloading"]["losses"] == modes["bf16"]["losses"]
    page = (tmp_path / "gpu-check-cpu.md").read_text()
    assert "| training | passed |" in page and "| recompute full |" in page


def train_tiny(folder: Path, *arguments: str) -> list[dict]:
    """Records of tools/gpu_check_training.py with these arguments, on the CPU."""
    out = folder / "records.jsonl"
    command: list[str | Path] = [sys.executable, TOOLS / "gpu_check_training.py", "--device", "cpu", "--size", "tiny"]
    subprocess.run(
        [*command, "--folder", folder / "models", "--out", out, *arguments],
        env=os.environ | {"CUDA_VISIBLE_DEVICES": ""},
        check=True,
    )
    return [record for line in out.read_text().splitlines() if "status" in (record := json.loads(line))]


def test_a_mode_may_run_twice_and_tells_where_its_time_goes(check: ModuleType, tmp_path: Path) -> None:
    """The second run is warm; a step under the profiler must not be the one that is timed."""
    records = train_tiny(tmp_path, "--profile", str(tmp_path / "profile.txt"), "fp32", "bf16", "bf16")
    assert [record["mode"] for record in records] == ["fp32", "bf16", "bf16 (2)"]
    assert [len(record["losses"]) for record in records] == [2, 4, 4]
    assert records[1]["losses"] == records[2]["losses"]
    assert check.mode_problems(records) == []
    pages = (tmp_path / "profile.txt").read_text().split("\n\n")
    for record, page in zip(records, pages, strict=False):
        shares = dict(record["profile"]["shares"])
        assert 0 < shares.pop("idle") < 1
        assert sum(shares.values()) == pytest.approx(1)
        assert min(shares["matrix products"], shares["attention"], shares["norms and elementwise"]) > 0.01
        title, *lines = page.splitlines()
        assert title.startswith(f"{record['mode']}: ")
        assert any(line.endswith("matrix products        aten::mm") for line in lines)
        assert sum("%" in line for line in lines) == len(record["profile"]["shares"]) + 35
    assert len(pages) == len(records) + 1


WITHOUT_FLA = """
import sys
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch
sys.path[:0] = sys.argv[1:2]
import gpu_check_training as training
import torch
from mgrpo.parallel import backend
from mgrpo.parallel.packed import delta_rule

calls = 0

def kernel(query, key, value, decay, beta, *, use_qk_l2norm_in_kernel, cu_seqlens):
    global calls
    calls += 1
    return torch.zeros_like(value) * (query.sum() + key.sum() + decay.sum() + beta.sum()), None

backend.install()
fla = SimpleNamespace(chunk_gated_delta_rule=kernel)
with (
    patch.object(backend, "has_cuda", lambda: True),
    patch.object(backend, "find_spec", lambda name: name),
    patch.object(backend, "import_module", lambda name: fla),
):
    assert backend.delta_rule_kernel(torch.bfloat16) is kernel  # which stays in the cache
folder, device = Path(sys.argv[2]), torch.device("cpu")
training.write_model(folder / "Qwen3-Next", "Qwen3-Next", "tiny", device)
for name in ("Qwen3-Next without fla", "Qwen3-Next"):
    figures = training.train(name, training.MODES[name], folder, training.WORK["tiny"], device, None)
    print(figures["delta_rule"], calls)
"""


def test_without_fla_its_kernel_is_never_called(tmp_path: Path) -> None:
    """The kernel is looked for once in a process: the two modes would be the same, and their difference 0."""
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_FLA, TOOLS, tmp_path], capture_output=True, text=True, check=True
    )
    without, with_fla = (line.split() for line in done.stdout.splitlines()[-2:])
    assert without == ["torch", "0"]
    assert with_fla[0] == "fla" and int(with_fla[1]) > 0


def steps_on(device: str, models: Path, out: Path) -> dict[str, dict]:
    """Float32 training of every small model, by its mode."""
    command: list[str | Path] = [sys.executable, TOOLS / "gpu_check_training.py", "--device", device, "--size", "tiny"]
    subprocess.run(
        [*command, "--folder", models, "--out", out, "fp32", "experts fp32", "softcap fp32"],
        env=os.environ | ({"CUDA_VISIBLE_DEVICES": ""} if device == "cpu" else {}),
        check=True,
    )
    records = map(json.loads, out.read_text().splitlines())
    return {record["mode"]: record for record in records if "status" in record}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
def test_steps_on_cuda_equal_those_on_the_cpu(tmp_path: Path) -> None:
    """Every kernel on the way, and the update: the second step's loss depends on the first one's weights."""
    expected, got = (steps_on(device, tmp_path / "models", tmp_path / device) for device in ("cpu", "cuda"))
    for name, figures in expected.items():
        assert got[name]["losses"] == pytest.approx(figures["losses"], rel=1e-4), name
        assert got[name]["grad_norms"] == pytest.approx(figures["grad_norms"], rel=1e-3), name


WORKER = """
import json, os, sys, time
out = sys.argv[sys.argv.index("--out") + 1]
for mode in sys.argv[sys.argv.index("--out") + 2:]:
    with open(out, "a") as file:
        print(json.dumps({"mode": mode}), file=file)
    if mode == "dies":
        print("a last word", flush=True)
        os.kill(os.getpid(), 9)
    if mode == "hangs":
        time.sleep(60)
    if mode == "fails":
        with open(out, "a") as file:
            print(json.dumps({"mode": mode, "status": "failed", "error": "wrong"}), file=file)
        os._exit(1)
    with open(out, "a") as file:
        print(json.dumps({"mode": mode, "status": "passed"}), file=file)
"""


def test_a_mode_that_dies_hangs_or_fails_hides_no_other(check: ModuleType, place, tmp_path: Path) -> None:
    """An illegal access ends the process, and a deadlock would take all ten minutes."""
    names = ["a", "dies", "b", "hangs", "c", "fails", "d"]
    records = check.train_modes([sys.executable, "-c", WORKER], names, place, mode_limit_s=1.5)
    assert [record["mode"] for record in records] == names
    assert [record["status"] for record in records] == ["passed", "failed"] * 3 + ["passed"]
    assert [record["error"] for record in records if "error" in record] == [
        "its process ended with -9",
        "its time was over",
        "wrong",
    ]
    assert records[1]["output"] == "a last word\n"


def test_a_mode_that_dies_in_its_first_run_runs_again(check: ModuleType, place) -> None:
    """The process that goes on must not name the second run as the first."""
    records = check.train_modes([sys.executable, "-c", WORKER], ["dies", "a", "dies", "a"], place)
    assert [record["mode"] for record in records] == ["dies", "a", "dies (2)", "a (2)"]
    assert [record["status"] for record in records] == ["failed", "passed", "passed", "passed"]


def test_when_the_time_is_over_the_rest_is_reported(check: ModuleType, tmp_path: Path) -> None:
    """A check that goes on after ten minutes is ended with the lease, without a report."""
    place = check.Place("cpu", True, tmp_path, time.monotonic() + 1)
    records = check.train_modes([sys.executable, "-c", WORKER], ["hangs", "a"], place)
    assert [record["error"] for record in records] == ["its time was over", "there was no time left"]
    assert check.check(check.extension, place).note == "there was no time left"


@pytest.mark.parametrize("left_out", [None, "native", "sanitizer"])
def test_every_part_has_its_share_of_ten_minutes(check: ModuleType, left_out: str | None) -> None:
    """A part that hangs, or that compiles all kernels for the first time, would leave nothing to those behind it."""
    parts = [name for name in check.PARTS if name != left_out]
    limits = check.limits(parts)
    assert list(limits) == parts and limits[parts[-1]] == check.LIMIT_S
    begun = 0.0
    for name in parts:  # each takes all that it may
        assert limits[name] - begun >= check.SHARES_S[name]
        begun = limits[name]
    assert check.limits(["training"]) == {"training": check.LIMIT_S}


def test_only_files_with_gpu_tests_are_collected(check: ModuleType, tmp_path: Path, monkeypatch) -> None:
    """The others import packages that a machine for a run does not have, and one error of collection ends pytest."""
    commands: list[list[str | Path]] = []

    def run(command: list[str | Path], *_: object) -> tuple[int, str]:
        commands.append(command)
        return 0, "1 passed"

    monkeypatch.setattr(check, "run", run)
    assert check.gpu_tests(check.Place("cuda", True, tmp_path, time.monotonic() + 30)).status == "passed"
    places = [Path(part) for part in commands[0] if "tests" in Path(part).parts]
    names = {place.name for place in places}
    assert {"test_ops_cuda.py", "test_attention_kernels.py", "test_rotary.py", Path(__file__).name} <= names
    assert all(place.is_file() and "pytest.mark.gpu" in place.read_text() for place in places)


def test_types_of_gpu_tests_are_checked(check: ModuleType) -> None:
    """CI cannot run them: mypy alone notices a call that the code no longer takes."""
    files = tomllib.loads((check.ROOT / "pyproject.toml").read_text())["tool"]["mypy"]["files"]
    assert files == ["mgrpo", *(str(path.relative_to(check.ROOT)) for path in check.files_with_gpu_tests())]


def test_gpu_tests_without_pytest_say_what_to_install(check: ModuleType, tmp_path: Path, monkeypatch) -> None:
    """It is not among the packages of a run; "No module named pytest" does not say where it comes from."""
    monkeypatch.setattr(check, "find_spec", lambda name: None)
    outcome = check.gpu_tests(check.Place("cuda", True, tmp_path, time.monotonic() + 30))
    assert (outcome.status, outcome.note) == ("failed", "pytest is not installed; `make dev` installs it")


def test_an_error_in_the_check_is_a_failed_part(check: ModuleType, place) -> None:
    """The report is written all the same."""

    def broken(place):
        raise KeyError("cuda_archs")

    outcome = check.check(broken, place)
    assert (outcome.status, outcome.note) == ("failed", "KeyError: 'cuda_archs'")


def mode(name: str, **figures: object) -> dict[str, object]:
    plain = {"status": "passed", "equals": "fp32", "losses": [-0.5], "grad_norms": [2.0], "peak_gib": 9.0}
    return {"mode": name, **plain, "planned_gib": 9.5, "allowed_gib": 10.0, "is_planned": True, **figures}


def test_a_mode_that_computes_something_else_is_a_problem(check: ModuleType) -> None:
    """Beyond what bf16 rounds, and beyond the memory that the plan promises."""
    modes = [
        mode("fp32", equals=None),
        mode("rounds", losses=[-0.505], grad_norms=[2.05]),
        mode("loss", losses=[-0.52]),
        mode("norm", grad_norms=[1.8]),
        mode("rounds (2)", losses=[-0.53]),
        mode("memory", peak_gib=10.5),
        mode("float32", peak_gib=10.5, is_planned=False),
        mode("other", equals=None, losses=[3.0]),
        {"mode": "dead", "status": "failed", "error": "wrong"},
    ]
    assert check.mode_problems(modes) == [
        "loss: the first of losses is -0.52, -0.5 in fp32",
        "norm: the first of grad_norms is 1.8, 2 in fp32",
        "rounds (2): the first of losses is -0.53, -0.5 in fp32",
        "memory: 10.50 GiB, but the plan allows 10.00",
        "dead: wrong",
    ]


def test_records_of_one_name_are_all_compared(check: ModuleType) -> None:
    """Two processes that append to one file name their runs the same."""
    modes = [mode("fp32", equals=None), mode("bf16", losses=[-0.6]), mode("bf16")]
    assert check.mode_problems(modes) == ["bf16: the first of losses is -0.6, -0.5 in fp32"]
    assert check.mode_problems(modes[::-1]) == ["bf16: the first of losses is -0.6, -0.5 in fp32"]


KERNELS = {
    "matrix products": [
        "sm90_xmma_gemm_bf16bf16_bf16f32_f32_tn_n_tilesize128x128x64_warpgroupsize1x1x1_execute_segment_k_off_kernel__5x_cublas",
        "nvjet_tst_256x128_64x4_2x1_v_bz_coopA_TNN",
        "void cutlass::device_kernel<at::cuda::detail::enable_3x_kernel_for_sm9x<cutlass::gemm::kernel::GemmUniversal<"
        "cutlass::gemm::GroupProblemShape<cute::tuple<int, int, int> >, cutlass::bfloat16_t> > >(Params)",
        "void cublasLt::splitKreduce_kernel<32, 16, int, float, __nv_bfloat16, float, __nv_bfloat16, true, true>",
        "void gemmSN_TN_kernel<float, 128, 16, 2, 4, 6, 7, true, cublasGemvTensorStridedBatched<float const> >",
        "aten::mm",
        "aten::_grouped_mm",
    ],
    "attention": [
        "void pytorch_flash::flash_fwd_kernel<Flash_fwd_kernel_traits<128, 64, 64, 4, false, false, cutlass::bfloat16_t> >",
        "void pytorch_flash::flash_bwd_dq_dk_dv_loop_seqk_parallel_kernel<Flash_bwd_kernel_traits<64, 128, 128, 8> >",
        "fmha_cutlassB_f32_aligned_64x64_k64_sm80(PyTorchMemEffAttention::AttentionBackwardKernel<cutlass::arch::Sm80>)",
        "triton_tem_fused_flex_attention_backward_0",
        "chunk_gated_delta_rule_fwd_kernel_h_blockdim64",
        "recompute_w_u_fwd_kernel",
        "aten::_scaled_dot_product_flash_attention_for_cpu",
    ],
    "optimizer": [
        "void at::native::(anonymous namespace)::multi_tensor_apply_kernel<at::native::(anonymous namespace)::"
        "FusedOptimizerTensorListMetadata<4>, at::native::(anonymous namespace)::FusedAdamMathFunctor<float, 4> >",
        "void at::native::lpnorm_cleanup<float, (at::native::NormType)1, float, float>",
        "aten::_foreach_mul_",
    ],
    "LM head and loss": [
        "void mgrpo::cuda::(anonymous namespace)::grad_kernel<__nv_bfloat16, true>(mgrpo::cuda::GradArgs)",
        "liger_cross_entropy_kernel",
        "void at::native::(anonymous namespace)::cunn_SoftMaxForward<8, c10::BFloat16, float, float, "
        "at::native::(anonymous namespace)::LogSoftMaxForwardEpilogue>",
    ],
    "norms and elementwise": [
        "triton_poi_fused__to_copy_add_mul_silu_0",
        "triton_red_fused_mean_mul_pow_rsqrt_1",
        "_rms_norm_backward_kernel",
        "_swiglu_forward_kernel",
        "_triton_rope",
        "void at::native::vectorized_elementwise_kernel<4, at::native::CUDAFunctor_add<c10::BFloat16> >",
        "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float, at::native::MeanOps<float, float> > >",
        "void (anonymous namespace)::softmax_warp_forward<float, float, float, 10, false, false>",
        "void at::native::(anonymous namespace)::indexSelectLargeIndex<c10::BFloat16, long, unsigned int, 2, 2, -2, true>",
        "aten::mul",
    ],
    "memory copies": [
        "Memcpy DtoH (Device -> Pinned)",
        "Memset (Device)",
        "void at::native::elementwise_kernel<128, 4, at::native::gpu_kernel_impl_nocast<at::native::direct_copy_kernel_cuda("
        "at::TensorIteratorBase&)::{lambda()#3}> >",
        "void at::native::(anonymous namespace)::CatArrayBatchedCopy<at::native::(anonymous namespace)::OpaqueType<2u> >",
    ],
    "collectives": ["ncclDevKernel_AllGather_RING_LL(ncclDevKernelArgsStorage<4096ul>)"],
    "other": ["MulBackward0"],
}


@pytest.mark.parametrize(("kind", "name"), [(kind, name) for kind, names in KERNELS.items() for name in names])
def test_kernels_belong_to_classes_by_their_names(report: ModuleType, kind: str, name: str) -> None:
    """Flash attention's names hold cutlass, a fused norm's hold copy: the profile would say to mend something else."""
    assert report.kernel_class(name) == kind


def test_shares_of_a_profile_by_hand(report: ModuleType) -> None:
    """Two streams overlap by 1 s: kernels of 8 s, in 7 of 10 s."""
    kernels = {"nvjet_tst_a": 4.0, "sm90_xmma_gemm_b": 1.0, "Memcpy HtoD (Pinned -> Device)": 2.0, "unheard_of": 1.0}
    shares = report.time_shares(kernels, busy_s=7.0, wall_s=10.0)
    found = {kind: share for kind, share in shares.items() if share}
    assert found == {"matrix products": 0.625, "memory copies": 0.25, "other": 0.125, "idle": pytest.approx(0.3)}
    nothing = report.time_shares({}, busy_s=0.0, wall_s=10.0)
    assert nothing.pop("idle") == 1.0 and not any(nothing.values())


def test_overlapping_kernels_count_once(report: ModuleType) -> None:
    """A copy beside a product would hide a gap of its length."""
    assert report.covered([(5.0, 6.0), (0.0, 4.0), (1.0, 2.0), (3.0, 4.5), (6.0, 7.0)]) == 6.5
    assert report.covered([]) == 0.0


def test_the_report_shows_profiles(report: ModuleType) -> None:
    """Modes without one have no line."""
    shares = report.time_shares({"nvjet_tst_a": 3.0, "aten::mul": 1.0}, busy_s=4.0, wall_s=5.0)
    _, heading, _, line = report.share_table([mode("fp32"), mode("bf16", profile={"shares": shares})])
    cells = dict(zip(heading.split(" | "), line.split(" | "), strict=True))
    assert (cells["| mode"], cells["matrix products"], cells["idle |"]) == ("| bf16", "75.0 %", "20.0 % |")
    assert report.share_table([mode("fp32")]) == []
