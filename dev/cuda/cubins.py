"""Finds or compiles the machine code of op set "cuda" for sm_90a."""
import hashlib, os, pathlib, shutil, subprocess, tempfile

ROOT = pathlib.Path(__file__).resolve().parents[2]


def find_tool(name):
    return shutil.which(name) or shutil.which(os.path.join(os.environ.get("CUDA", "/usr/local/cuda"), "bin", name))


def cubin_of(path):
    if not os.path.isfile(path):
        raise ValueError(f"there is no file {path}")
    data = pathlib.Path(path).read_bytes()
    if data[:4] == b"\x7fELF" and data[18] == 190:
        return data
    if not find_tool("cuobjdump"):
        raise ValueError(f"{path} is no cubin, and cuobjdump is missing; set CUDA, or use nvcc -cubin -arch=sm_90a")
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([find_tool("cuobjdump"), "-xelf", "all", os.path.abspath(path)], cwd=folder,
                       stdout=subprocess.DEVNULL)
        found = [file.read_bytes() for file in pathlib.Path(folder).iterdir() if "sm_90" in file.name]
    if not found:
        raise ValueError(f"{path} has no code for sm_90")
    return max(found, key=len)


def compiler_version():
    """Release and build of nvcc; None: there is none"""
    nvcc = find_tool("nvcc")
    out = subprocess.run([nvcc, "--version"], capture_output=True, text=True, check=True).stdout if nvcc else ""
    return next(("nvcc " + line.split("V")[-1] for line in out.splitlines() if "release" in line), None)


def compiled(symbols=()):
    """The bytes of op set "cuda" in bf16 for sm_90a; symbols: parts of mangled names, of these kernels alone"""
    nvcc, ptxas = find_tool("nvcc"), find_tool("ptxas")
    if not nvcc or not ptxas:
        raise ValueError("nvcc or ptxas is missing; set CUDA to a toolkit, or give a cubin")
    sources = sorted([*ROOT.glob("llmc/**/*.h"), *ROOT.glob("llmc/ops/cuda/*.cu*")])
    made_of = [repr((compiler_version(), symbols)).encode()] + [f.read_bytes() for f in sources]
    cubin = ROOT / "build/cycles" / f"{hashlib.sha256(bytes(1).join(made_of)).hexdigest()[:16]}.cubin"
    if not cubin.exists():
        cubin.parent.mkdir(parents=True, exist_ok=True)
        for old in sorted(cubin.parent.glob("*.cubin"), key=os.path.getmtime)[:-8]:
            old.unlink()
        compile_to(cubin, nvcc, ptxas, symbols)
    return cubin.read_bytes()


def compile_to(cubin, nvcc, ptxas, symbols):
    with tempfile.TemporaryDirectory() as folder:
        ptx = pathlib.Path(folder) / "ops.ptx"
        flags = ["-D_GNU_SOURCE", "-DPRECISION_BF16", "-w", "-I."] + ([] if symbols else ["-DHAVE_CUDNN"])
        subprocess.run([nvcc, "-std=c++20", "-x", "cu", "-O3", "-arch=sm_90a", "-ptx", *flags, "-o", ptx,
                        "llmc/ops/cuda/ops_cuda.cu"], cwd=ROOT, check=True)
        entries = [line.split("(")[0].split()[-1] for line in ptx.read_text().splitlines() if ".entry" in line]
        chosen = [argument for e in entries if any(s in e for s in symbols) for argument in ("-e", e)]
        subprocess.run([ptxas, "-arch=sm_90a", "-O3", *chosen, ptx, "-o", folder + "/cubin"], check=True)
        shutil.move(folder + "/cubin", cubin)
