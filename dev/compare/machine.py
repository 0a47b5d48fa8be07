"""Describes the machine: device, clocks, versions, and the peak rate for shares."""

import contextlib
import json
import os
import shutil
import statistics
import subprocess
import tempfile

from contenders import HERE, ROOT

GPU = os.environ.get("CUDA_VISIBLE_DEVICES", "0").split(",")[0] or "0"  # the first GPU of contenders
LIMITS = ("ONEDNN_MAX_CPU_ISA", "ATEN_CPU_CAPABILITY", "MKL_ENABLE_INSTRUCTIONS")
PEAKS = os.path.join(ROOT, "scripts", "gpu_peaks.txt")


def output_of(command):
    """Returns its stdout; "" if there is no such program or it fails."""
    try:
        run = subprocess.run(command, capture_output=True, text=True, cwd=ROOT)
    except OSError:
        return ""
    return run.stdout.strip() if run.returncode == 0 else ""


def ask_gpu(fields):
    """Queries nvidia-smi for the first GPU of contenders."""
    lines = output_of(["nvidia-smi", "-i", GPU, f"--query-gpu={fields}", "--format=csv,noheader,nounits"]).splitlines()
    return lines[0] if lines and "error" not in lines[0].lower() else ""


def cpu_name():
    """Returns the CPU's name, cores, and the instruction sets that the environment allows oneDNN and PyTorch."""
    with open("/proc/cpuinfo") as file:
        models = [line.split(":", 1)[1].strip() for line in file if line.startswith("model name")]
    limits = {os.environ[name].upper() for name in LIMITS if os.environ.get(name)}
    limited = f", libraries limited to {'/'.join(sorted(limits))}" if limits else ""
    return f"{models[0] if models else 'CPU'}, {len(os.sched_getaffinity(0))} cores{limited}"


def commit():
    """Returns HEAD, marked if tracked files differ from it."""
    head = output_of(["git", "rev-parse", "HEAD"]) or "unknown"
    return head + "-modified" if output_of(["git", "status", "--porcelain", "--untracked-files=no"]) else head


@contextlib.contextmanager
def gpu_watched(on_gpu):
    """Yields a dictionary, at the end with [least, median, most] of clock, power and temperature while the GPU was busy."""
    found = {}
    fields = "utilization.gpu,clocks.sm,power.draw,temperature.gpu"
    unbuffered = ["stdbuf", "-oL"] if shutil.which("stdbuf") else []
    if not on_gpu or not shutil.which("nvidia-smi"):
        yield found
        return
    with tempfile.TemporaryFile("w+") as file:
        command = ["nvidia-smi", "-i", GPU, f"--query-gpu={fields}", "--format=csv,noheader,nounits", "-lms", "200"]
        process = subprocess.Popen(unbuffered + command, stdout=file, stderr=subprocess.DEVNULL)
        try:
            yield found
        finally:
            process.terminate()
            process.wait()
            file.seek(0)
            rows = [line.split(",") for line in file if line.endswith("\n") and line.count(",") == 3 and "[" not in line]
            busy = [[float(word) for word in row[1:]] for row in rows if float(row[0]) >= 90]
            for name, column in zip(("sm_mhz", "power_w", "temperature_c"), zip(*busy)):
                found[name] = [min(column), statistics.median(column), max(column)]


def known_peak(device_name, dtype):
    """Returns dense TFLOP/s of the data sheet, or None."""
    with open(PEAKS, encoding="utf-8") as file:
        for line in file:
            words = line.split()
            if words and words[0] != "#" and " ".join(words[:-2]) in device_name:
                return float(words[-2] if dtype == "bf16" else words[-1])
    return None


def peak(options):
    """Returns (TFLOP/s, source of the figure), or (None, why there is none)."""
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
