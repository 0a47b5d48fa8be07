"""What is measured on: device, clocks, versions, and the rate that shares of the peak are taken of."""

import json
import os
import subprocess

from contenders import HERE, ROOT

PEAKS = os.path.join(ROOT, "scripts", "gpu_peaks.txt")


def output_of(command):
    """Its stdout, or nothing where there is no such program or it fails."""
    try:
        run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    except OSError:
        return ""
    return run.stdout.strip() if run.returncode == 0 else ""


def ask_gpu(fields):
    """What nvidia-smi says of the GPU that contenders see as their first."""
    gpu = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"
    lines = output_of(["nvidia-smi", "-i", gpu, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]).splitlines()
    return lines[0] if lines and "error" not in lines[0].lower() else ""


def cpu_name():
    with open("/proc/cpuinfo") as file:
        models = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    return f"{models[0] if models else 'CPU'}, {len(os.sched_getaffinity(0))} cores"


def commit():
    """HEAD, marked where tracked files differ from it."""
    head = output_of(["git", "rev-parse", "HEAD"]) or "unknown"
    return head + "-modified" if output_of(["git", "status", "--porcelain", "--untracked-files=no"]) else head


def clocks():
    return {
        "sm_mem_mhz": ask_gpu("clocks.sm,clocks.mem"),
        "most_mhz": ask_gpu("clocks.max.sm,clocks.max.mem"),
        "power_limit_w": ask_gpu("power.limit"),
    }


def known_peak(device_name, dtype):
    """Dense TFLOP/s of the data sheet, or None."""
    with open(PEAKS, encoding="utf-8") as file:
        for line in file:
            words = line.split()
            if words and words[0] != "#" and " ".join(words[:-2]) in device_name:
                return float(words[-2] if dtype == "bf16" else words[-1])
    return None


def peak(options):
    """(TFLOP/s, where the figure comes from); (None, why there is none)."""
    if options.peak:
        return options.peak, "--peak"
    if not options.on_gpu:
        return None, "a CPU that is shared has no steady peak (--peak TFLOPS)"
    found = known_peak(options.device_name, options.dtype)
    if found:
        return found, "the data sheet"
    measured = output_of(
        [options.python, os.path.join(HERE, "product.py"), options.device, options.dtype, str(options.threads or 0)]
    )
    if measured:
        return json.loads(measured)["tflops"], "PyTorch's own product, measured"
    return None, "unknown device, and no PyTorch to measure a product with (--peak TFLOPS)"
